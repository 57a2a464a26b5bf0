"""BrowseComp-Plus, on files of its published formats: corpus and questions, whole episodes with its tools, and what is
reported: evidence recall, confidence, calibration."""

from __future__ import annotations

import base64
import codecs
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluation_world import Answer, ModelServer, choice
from format_models import model_format, tokenizer_of
from served_app import served_corpus

from search_r1.data.browsecomp import main as make
from search_r1.data.browsecomp import write_browsecomp
from search_r1.evaluation.__main__ import main
from search_r1.evaluation.store import stated_confidence
from verl.errors import ConfigError, DataError

NAME = "default-system"
RIVER = "---\ntitle: The Ildra\ndate: 2020-01-01\n---\nThe Ildra is a river. " + "It is long and wet. " * 60
DOCUMENTS: list[dict[str, Any]] = [
    {"docid": "101", "text": f"{RIVER}It ends in Vonmark.", "url": "https://rivers.example/ildra"},
    {
        "docid": "102",
        "text": "Vonmark is a city of the country Sael.\ntitle: no front matter",
        "url": "https://v.example",
    },
    {"docid": "103", "text": "Nara Quill was a poet. </information>", "url": ""},
]
QUESTION = "In which country does the river end that is long and wet?"
QUESTIONS: list[dict[str, Any]] = [
    {
        "query_id": "7",
        "query": QUESTION,
        "answer": "Sael",
        "gold_docs": [DOCUMENTS[1]],
        "evidence_docs": [*DOCUMENTS[:2], DOCUMENTS[0]],
        "negative_docs": [DOCUMENTS[2]],
    },
    {"query_id": 8, "query": "Who was a poet?", "answer": "Nara Quill", "evidence_docs": [DOCUMENTS[2]]},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, list[Path]]:
    """The questions, and the corpus in two files."""
    pq.write_table(pa.Table.from_pylist(DOCUMENTS[:2]), tmp_path / "part-0.parquet")
    return lines(tmp_path / "queries.jsonl", QUESTIONS), [
        tmp_path / "part-0.parquet",
        lines(tmp_path / "part-1.jsonl", DOCUMENTS[2:]),
    ]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_corpus_and_questions(files: tuple[Path, list[Path]], tmp_path: Path, capsys: Any) -> None:
    queries, corpus = files
    folder = tmp_path / "my data é"
    command = ["--queries", str(queries), "--corpus", *map(str, corpus), "--output_dir", str(folder)]
    assert make(command) == 0
    assert "3 documents" in capsys.readouterr().out
    assert [(row["id"], row["contents"].partition("\n")[0]) for row in read(folder / "corpus.jsonl")] == [
        ("101", '"The Ildra"'),
        ("102", '"https://v.example"'),
        ("103", '"103"'),
    ]
    river, poet = read(folder / "browsecomp_plus/test.jsonl")
    assert river == {
        "id": "7",
        "question": QUESTION,
        "golden_answers": ["Sael"],
        "metadata": {"evidence": ["101", "102"], "gold": ["102"]},
    }
    assert (poet["id"], poet["metadata"]) == ("8", {"evidence": ["103"], "gold": []})
    assert make(command) == 2 and "is in use" in capsys.readouterr().err
    # The evidence of the set's judgements, in place of that of the questions.
    qrels = tmp_path / "qrel_evidence.txt"
    qrels.write_text("7 0 102 1\n7 0 103 0\n8 Q0 103 1\n\n")
    write_browsecomp(queries, corpus, tmp_path / "other", qrels)
    assert [row["metadata"]["evidence"] for row in read(tmp_path / "other/browsecomp_plus/test.jsonl")] == [
        ["102"],
        ["103"],
    ]


def test_files_with_a_byte_order_mark(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    queries, corpus = files
    qrels = tmp_path / "qrel_evidence.txt"
    qrels.write_text("7 0 102 1\n8 0 103 1\n")
    for marked in (queries, corpus[1], qrels):
        marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
    counts = write_browsecomp(queries, corpus, tmp_path / "made", qrels)
    assert counts == {"documents": 3, "questions": 2, "evidence": 2}


def changed(row: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    return [row | values]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (changed(QUESTIONS[0], query=base64.b64encode(b"a question that is encrypted").decode()), "is encrypted; run"),
        (changed(QUESTIONS[0], query=" "), r"line 1: 'query' is ' ', not a text"),
        (changed(QUESTIONS[0], evidence_docs=[]), "question 7 has no 'evidence_docs': give --qrels"),
        (changed(QUESTIONS[0], evidence_docs=["101"]), "not a list of documents"),
        (changed(QUESTIONS[0], evidence_docs=[{"docid": "404"}]), r"--corpus lacks: \['404'\]"),
        ([QUESTIONS[0], QUESTIONS[0]], "line 2: question 7 has come before"),
    ],
)
def test_questions_that_are_not_as_published(
    files: tuple[Path, list[Path]], tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        write_browsecomp(lines(tmp_path / "other.jsonl", rows), files[1], tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_corpus_that_is_not_as_published(files: tuple[Path, list[Path]], tmp_path: Path) -> None:
    queries, corpus = files
    for rows, said in (
        ([{"docid": "1"}], "line 1: 'text' is None, not a text"),
        (DOCUMENTS[:1], "other.jsonl: line 1: document 101 has come before"),
    ):
        with pytest.raises(DataError, match=said):
            write_browsecomp(queries, [*corpus, lines(tmp_path / "other.jsonl", rows)], tmp_path / "made")
    for text, said in (("[1]\n", "line 1 is no JSON object"), ("\n\n{\n", "line 3 is no JSON")):
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(DataError, match=said):
            write_browsecomp(queries, [tmp_path / "other.jsonl"], tmp_path / "made")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"broken\.parquet cannot be read"):
        write_browsecomp(queries, [tmp_path / "broken.parquet"], tmp_path / "made")
    (tmp_path / "qrels.txt").write_text("7 102\n")
    with pytest.raises(DataError, match="line 1 is '7 102"):
        write_browsecomp(queries, corpus, tmp_path / "made", tmp_path / "qrels.txt")
    (tmp_path / "made").mkdir()
    (tmp_path / "made/file").touch()
    with pytest.raises(ConfigError, match="is in use"):
        write_browsecomp(queries, corpus, tmp_path / "made")


def turn(content: str, *calls: tuple[str, dict[str, Any]]) -> Answer:
    made = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    ids = list(model_format(NAME).turn({"role": "assistant", "content": content, "tool_calls": made}))
    return choice(content, token_ids=ids, logprobs={"token_logprobs": [-0.5] * len(ids)})


def test_an_evaluation_with_its_tools(
    files: tuple[Path, list[Path]], tmp_path: Path, model_server: ModelServer
) -> None:
    write_browsecomp(*files, tmp_path / "made")
    tokenizer_of(NAME).save_pretrained(tmp_path / "tokenizer")
    model_server.models = [{"id": "m", "max_model_len": 8000}]
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> Answer:
        text = tokenizer_of(NAME).decode(body["prompt"])
        asked.append(text)
        if "poet" in text.partition("Question: ")[2].partition("\n")[0]:
            return turn("<answer> Nara Quill </answer> **Confidence:** 90%")  # without a search
        num_results = text.count("<tool_response>")
        if num_results == 0:
            return turn("", ("search", {"query": "Ildra long and wet"}))
        if num_results == 1:
            return turn("", ("get_document", {"docid": "101"}))
        return turn("It is <answer> Osk </answer> Confidence: 60%")

    model_server.answer = answer
    with served_corpus(tmp_path / "made/corpus.jsonl") as url:
        command = [
            *("--server", model_server.url, "--served_model", "m", "--tokenizer", str(tmp_path / "tokenizer")),
            *("--template", "browsecomp", "agent.format=chat", "retriever.topk=1", "--max_turns", "5"),
            "agent.tools=[{name: search, options: {max_passage_tokens: 24}}, get_document]",
            *("--max_prompt_length", "6000", "data.max_obs_length=2000", "--retriever_url", url),
            *("--data", f"browsecomp_plus={tmp_path / 'made/browsecomp_plus/test.jsonl'}"),
            *("--output_dir", str(tmp_path / "out")),
        ]
        assert main(command) == 0
    by_id = {record["id"]: record for record in read(tmp_path / "out/records.jsonl")}
    river, poet = by_id["7"]["metrics"], by_id["8"]["metrics"]
    # One of its two evidence documents was shown; what was opened was not searched for.
    assert (river["evidence_recall"], river["confidence"], river["em"]) == (0.5, 0.6, 0)
    assert (river["searches"], river["calls"]) == (1, 2)
    assert (poet["evidence_recall"], poet["confidence"], poet["em"]) == (0, 0.9, 1)
    # The search shows the beginning, the document all of it.
    last = max((text for text in asked if "<tool_response>" in text), key=len)
    found, document = last.split("<tool_response>")[1:3]
    assert "id: 101" in found and "It ends in Vonmark" not in found and "It ends in Vonmark" in document
    # Of confidences .6 (wrong) and .9 (right): |.75 - .5| in one bin.
    measured = json.loads((tmp_path / "out/results.json").read_text())["sets"]["browsecomp_plus"]["calibration"]
    assert measured == {
        "right_by": "em",
        "answers": 2,
        "confidence": pytest.approx(0.75),
        "right": 0.5,
        "error": pytest.approx(0.25),
        "error_as_published": None,
    }
    page = (tmp_path / "out/results.md").read_text()
    assert "| evidence recall | confidence |" in page
    assert "| browsecomp_plus | 2 | 75.0 | 50.0 (EM) | 25.0 | - |" in page


@pytest.mark.parametrize(
    ("text", "confidence"),
    [
        ("Confidence: 85%", 0.85),
        ("**Confidence:** 7.5 %", 0.075),
        ("confidence (90%), no: Confidence: 40%", 0.4),
        ("Confidence: 250%", 1.0),
        ("I have confidence in 3 sources", None),
        ("overconfidence: 50%", None),
        ("", None),
    ],
)
def test_the_stated_confidence(text: str, confidence: float | None) -> None:
    assert stated_confidence(text) == confidence
