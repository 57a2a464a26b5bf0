"""`search-r1 data contexts`: a corpus and question files from the paragraphs that multi-hop questions come with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from served_app import served_app
from transformers import PreTrainedTokenizerFast, Qwen2Config

from search_r1.data import contexts
from search_r1.data.contexts import main, parse_arguments, write_contexts
from search_r1.data.corpus import command_line as corpus_tool
from search_r1.data.episodes import __main__ as episodes
from search_r1.data.qa.source_files import BadRows
from search_r1.search import index_builder
from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.retriever import RetrieverOptions
from search_r1.search.retriever_loading import load_retriever
from search_r1.search.server.retrieval_service import RetrievalService
from verl.errors import ConfigError, DataError

RIVER = ("Ildra", ["The Ildra is a river.", " It flows through the city of Vonmark."])
CITY = ("Vonmark", ["Vonmark is a city of the country Sael."])
OTHER_CITY = ("Vonmark", ["Vonmark is also a family name."])
POET = ("Nara Quill", ["Nara Quill was a poet, born in 1931."])
QUESTIONS: list[dict[str, Any]] = [
    {
        "id": "5a7a0",
        "question": "Through which country does the river Ildra flow?",
        "answer": "Sael",
        "type": "bridge",
        "facts": [("Ildra", 1), ("Vonmark", 0)],
        "context": [RIVER, POET, CITY],
    },
    {
        "id": "5a7a1",
        "question": "When was the poet Nara Quill born?",
        "answer": "1931",
        "type": "comparison",
        "facts": [("Nara Quill", 0)],
        "context": [POET, OTHER_CITY, RIVER],
    },
]
PASSAGES = [
    '"Ildra"\nThe Ildra is a river. It flows through the city of Vonmark.',
    '"Nara Quill"\nNara Quill was a poet, born in 1931.',
    '"Vonmark"\nVonmark is a city of the country Sael.',
    '"Vonmark"\nVonmark is also a family name.',
]
Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Path]


def columns(pairs: Sequence[tuple[str, Any]], name: str) -> dict[str, list[Any]]:
    return {"title": [title for title, _ in pairs], name: [other for _, other in pairs]}


def hub_parquet(folder: Path, questions: Rows, level: bool = True) -> Path:
    """As hotpotqa/hotpot_qa has them on the hub."""
    rows = [
        {key: one[key] for key in ("id", "question", "answer", "type")}
        | ({"level": "hard"} if level else {})
        | {"supporting_facts": columns(one["facts"], "sent_id"), "context": columns(one["context"], "sentences")}
        for one in questions
    ]
    path = folder / "validation-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def of_the_authors(questions: Rows) -> Rows:
    return [
        {"_id": one["id"], "type": one["type"], "question": one["question"], "answer": one["answer"]}
        | {"supporting_facts": list(map(list, one["facts"])), "context": list(map(list, one["context"]))}
        for one in questions
    ]


def authors_json(folder: Path, questions: Rows) -> Path:
    """The array that the authors of HotpotQA and of 2WikiMultiHopQA publish."""
    path = folder / "dev.json"
    path.write_text(json.dumps(of_the_authors(questions)))
    return path


def parquet_of_texts(folder: Path, questions: Rows) -> Path:
    """As xanhho/2WikiMultihopQA has them on the hub: the tables are JSON texts."""
    tables = ("supporting_facts", "context")
    rows = [
        {key: json.dumps(value) if key in tables else value for key, value in row.items()}
        for row in of_the_authors(questions)
    ]
    path = folder / "dev.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def flashrag(folder: Path, questions: Rows) -> Path:
    """As FlashRAG has 2WikiMultiHopQA."""
    path = folder / "dev.jsonl"
    rows = [
        {"id": one["id"], "question": one["question"], "golden_answers": [one["answer"]]}
        | {
            "metadata": {"type": one["type"], "supporting_facts": columns(one["facts"], "sent_id")}
            | {"context": columns(one["context"], "content")}
        }
        for one in questions
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def words(folder: Path, **sets: Sequence[Path]) -> list[str]:
    given = [word for name, files in sets.items() for word in ("--set", f"{name}/dev", *map(str, files))]
    return [*given, "--output_dir", str(folder)]


@pytest.mark.parametrize("write", [hub_parquet, authors_json, parquet_of_texts, flashrag])
def test_every_published_form_gives_the_same_corpus_and_questions(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert main(words(folder, rivers=[write(tmp_path, QUESTIONS)])) == 0
    corpus = [{"id": str(number), "contents": contents} for number, contents in enumerate(PASSAGES)]
    assert lines(folder / "corpus.jsonl") == corpus == list(Corpus(folder / "corpus.jsonl"))
    facts = [{"title": ["Ildra", "Vonmark"], "sent_id": [1, 0]}, {"title": ["Nara Quill"], "sent_id": [0]}]
    more = {"level": "hard"} if write is hub_parquet else {}
    assert lines(folder / "rivers" / "dev.jsonl") == [
        {"id": one["id"], "question": one["question"], "golden_answers": [one["answer"]]}
        | {"metadata": {"type": one["type"], "supporting_facts": found} | more}
        for one, found in zip(QUESTIONS, facts, strict=True)
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{folder}: 4 passages in corpus.jsonl"
    assert [cell.strip() for cell in said[-1].strip("|").split("|")] == ["rivers/dev", "2", "6", "4", "4", "0"]


def test_sets_and_files_share_one_corpus(tmp_path: Path) -> None:
    """Shards of a split follow one another, and a later set adds only what is new. The same input gives the same
    bytes."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    shards = [hub_parquet(first, QUESTIONS[:1]), hub_parquet(second, QUESTIONS[1:])]
    lost = QUESTIONS[0] | {"id": "x", "context": [POET, ("Ardell", ["A poet."])]}
    sets = {"hotpotqa/dev": shards, "wiki/dev": [authors_json(third, [lost])]}
    counts = write_contexts(sets, tmp_path / "made")
    assert [row["contents"] for row in lines(tmp_path / "made/corpus.jsonl")] == [*PASSAGES, '"Ardell"\nA poet.']
    assert [row["id"] for row in lines(tmp_path / "made/hotpotqa/dev.jsonl")] == ["5a7a0", "5a7a1"]
    assert counts == [
        {"set": "hotpotqa/dev", "questions": 2, "paragraphs": 6, "new": 4, "passages": 4, "without_gold": 0},
        {"set": "wiki/dev", "questions": 1, "paragraphs": 2, "new": 1, "passages": 1, "without_gold": 1},
    ]
    write_contexts(sets, tmp_path / "again")
    for name in ("corpus.jsonl", "hotpotqa/dev.jsonl", "wiki/dev.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()


def test_a_long_paragraph_is_cut_at_sentences_and_an_empty_one_left_out(tmp_path: Path) -> None:
    sentences = [f"Sentence {number} of the text has eight words here." for number in range(30)]
    question = QUESTIONS[1] | {"context": [("Long", sentences), ("Empty", []), POET]}
    [count] = write_contexts({"a/dev": [authors_json(tmp_path, [question])]}, tmp_path / "made", words=60)
    contents = [row["contents"] for row in lines(tmp_path / "made/corpus.jsonl")]
    texts = [text.removeprefix('"Long"\n') for text in contents[:-1]]
    assert len(texts) > 2 and " ".join(texts) == " ".join(sentences) and contents[-1] == PASSAGES[1]
    assert all(len(text.split()) <= 75 for text in texts)
    assert (count["paragraphs"], count["new"], count["passages"]) == (2, 2, len(contents))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"context": [["Ildra", ["A river."]], ["Vonmark"]]}, "the paragraphs in its metadata cannot be read"),
    ({"context": []}, "context: it has no paragraph"),
    ({"context": None}, "the paragraphs in its metadata cannot be read"),
    ({"context": "[[1"}, "JSONDecodeError"),
    ({"context": {"title": ["A", "B"], "sentences": [["x"]]}}, "it has 2 titles, but 1 entries in sentences"),
    ({"context": {"title": ["A"]}}, "KeyError('sentences')"),
    ({"context": [[7, ["x"]]]}, "the title of paragraph 1 is 7, not a line of text"),
    ({"context": [["A", ["x"]], ["B\nC", ["x"]]]}, "the title of paragraph 2 is 'B\\nC', not a line of text"),
    ({"context": [["A", "a text"]]}, "paragraph 1, 'A', has no list of sentences that are texts"),
    ({"context": [["A", [1]]]}, "paragraph 1, 'A', has no list of sentences that are texts"),
    ({"supporting_facts": [["A"]]}, "the supporting facts in its metadata cannot be read"),
    ({"supporting_facts": {"title": ["A"], "sent_id": []}}, "it has 1 titles, but 0 entries in sent_id"),
    ({"answer": None}, "not a list of texts"),
]


@pytest.mark.parametrize(("change", "reason"), BROKEN)
def test_a_bad_row_ends_it_or_is_left_out(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = of_the_authors(QUESTIONS)
    path, folder = tmp_path / "dev.json", tmp_path / "made"
    path.write_text(json.dumps([good, bad | change]))
    assert main(words(folder, a=[path])) == 2
    said = capsys.readouterr().err
    assert reason in said and "or leave such rows out by --skip_bad_rows" in said
    assert f"{path}: row 1 (question 5a7a1): " in said or f"{path}:1: " in said
    assert list(tmp_path.iterdir()) == [path], "nothing is left"
    assert main([*words(folder, a=[path]), "--skip_bad_rows"]) == 0
    assert reason in capsys.readouterr().err
    assert [row["contents"] for row in lines(folder / "corpus.jsonl")] == PASSAGES[:3]


def test_what_has_no_contexts_is_told(tmp_path: Path) -> None:
    def refused(path: Path, reason: str, skip: bool = False) -> None:
        with pytest.raises(DataError, match=reason):
            write_contexts({"a/dev": [path]}, tmp_path / "made", bad_rows=BadRows(skip))
        assert not (tmp_path / "made").exists()

    plain = tmp_path / "nq.jsonl"
    plain.write_text('{"id": "7", "question": "Who?", "golden_answers": ["x"]}\n')
    refused(plain, r"nq.jsonl: row 0 \(question 7\): .*there is no 'context', which HotpotQA and 2WikiMultiHopQA have")
    refused(plain, "nq.jsonl: no row has a question with its context", skip=True)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "text"}\n')
    refused(corpus, "corpus.jsonl:1: a row with the keys id, contents; .*known formats")
    refused(tmp_path / "gone.parquet", "gone.parquet does not exist")
    (tmp_path / "broken.parquet").write_text("no parquet")
    refused(tmp_path / "broken.parquet", "broken.parquet cannot be read as parquet")
    refused(tmp_path / "dev.xlsx", "is none of .jsonl, .json")
    twice = authors_json(tmp_path, QUESTIONS)
    with pytest.raises(DataError, match=r"row 0 \(question 5a7a0\): the id stands already in .*dev.json"):
        write_contexts({"a/dev": [twice, twice]}, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_folder_in_use_is_kept(tmp_path: Path) -> None:
    source, folder = authors_json(tmp_path, QUESTIONS), tmp_path / "made"
    folder.mkdir()
    write_contexts({"a/dev": [source]}, folder)  # an empty one is filled
    before = (folder / "corpus.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"--output_dir .*made is in use; name a folder that does not exist"):
        write_contexts({"b/dev": [source]}, folder)
    with pytest.raises(ConfigError, match="is in use"):
        write_contexts({"b/dev": [source]}, source)
    assert (folder / "corpus.jsonl").read_bytes() == before and not (folder / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "hotpotqa", "f"], "give SET/SPLIT, such as hotpotqa/dev"),
        (["--set", "../x/dev", "f"], "give SET/SPLIT"),
        (["--set", "a/dev"], "after it its files"),
        (["--set", "a/dev", "f", "--set", "a/dev", "g"], "each once"),
        (["--set", "a/dev", "f", "--words", "3"], "--words 3 is less than 10"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*arguments, "--output_dir", "made"])
    assert said in capsys.readouterr().err


def test_from_contexts_to_a_search_of_two_hops(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Corpus, index, retriever, the audit's subsets, and episodes that search twice."""
    folder, subsets, output = tmp_path / "made", tmp_path / "subsets", tmp_path / "rows.parquet"
    assert contexts.main(words(folder, hotpotqa=[hub_parquet(tmp_path, QUESTIONS)])) == 0
    corpus, questions = folder / "corpus.jsonl", folder / "hotpotqa" / "dev.jsonl"
    built = ["--retrieval_method", "bm25", "--corpus_path", str(corpus), "--save_dir", str(tmp_path)]
    assert index_builder.main(built) == 0
    rows = Corpus(corpus)
    retriever = load_retriever(RetrieverOptions("bm25", index_path=str(tmp_path / "bm25")), rows)
    Qwen2Config(vocab_size=len(byte_tokenizer), max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    byte_tokenizer.save_pretrained(tmp_path / "model")
    with served_app(create_app(RetrievalService(retriever, rows))) as address:
        url = f"{address}/retrieve"
        audit = ["audit", "--corpus_path", str(corpus), "--questions", str(questions), "--url", url]
        assert corpus_tool.main([*audit, "--subsets", str(subsets), "--subset_k", "1"]) == 0
        asked = ["--questions", str(questions), "--model", str(tmp_path / "model"), "--output", str(output)]
        lengths = ["data.max_start_length=1500", "data.max_prompt_length=3000"]
        assert episodes.main([*asked, "--retriever_url", url, "--topk", "1", "--strategies", "hops", *lengths]) == 0
    found = [row["id"] for path in sorted((subsets / "second_query").iterdir()) for row in lines(path)]
    assert found == ["5a7a0"]
    [written] = [row for row in pq.read_table(output).to_pylist() if row["question"] == QUESTIONS[0]["question"]]
    said = [segment["text"] for segment in written["segments"] if segment["source"] == "policy"]
    assert "<search> Ildra </search>" in said[0] and "<search> Vonmark </search>" in said[1]
    assert "<answer> Sael </answer>" in said[2]
