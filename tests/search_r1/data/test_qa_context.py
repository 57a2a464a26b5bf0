"""Prompts with retrieved passages: from a cache, from a running server, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from data_scripts import run_script, write_lines
from served_app import served_corpus

from search_r1.llm_agent.templates import load_template
from search_r1.search.client import retrieval_client

SCRIPT = "data_process/nq_rag.py"
PASSAGES = [
    ("Lune", "The Lune is a river in England."),
    ("Osk", "Osk is a town by the sea."),
    ("Vale", "A vale is a valley."),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    question = {"id": "a", "question": "what is the lune ", "golden_answers": ["a river"]}
    write_lines(tmp_path / "qa/nq/test.jsonl", [question])
    write_corpus(tmp_path, ["0", "1", "2"])
    return tmp_path


def write_corpus(folder: Path, ids: list[str]) -> None:
    rows = [
        {"id": number, "contents": f'"{title}"\n{text}'} for number, (title, text) in zip(ids, PASSAGES, strict=True)
    ]
    write_lines(folder / "corpus.jsonl", rows)


def run_rag(folder: Path, *arguments: object) -> int:
    return run_script(SCRIPT, "--local_dir", folder / "o", "--input_dir", folder / "qa", "--splits", "test", *arguments)


def cached(folder: Path, cache: object) -> tuple[object, ...]:
    (folder / "cache.json").write_text(json.dumps(cache))
    return ("--test_retrieval_cache", folder / "cache.json", "--corpus_path", folder / "corpus.jsonl")


def content_of(folder: Path) -> str:
    [row] = pq.read_table(folder / "o/test.parquet").to_pylist()
    return row["prompt"][0]["content"]


def expected(context: str) -> str:
    text = load_template("rag").text
    return text.replace("{question}", "what is the lune?").replace("{context}", context)


@pytest.mark.parametrize("ids", [["0", "1", "2"], ["x", "y", "z"], ["2", "0", "1"]], ids=["rows", "names", "moved"])
@pytest.mark.parametrize("question", ["what is the lune ", "what is the lune", "what is the lune?"])
def test_cached_passages_in_the_published_layout(folder: Path, ids: list[str], question: str) -> None:
    write_corpus(folder, ids)
    arguments = cached(folder, {question: [{"id": ids[2]}, {"id": ids[0], "score": 1.5}, {"id": ids[1]}]})
    assert run_rag(folder, *arguments, "--topk", 2) == 0
    assert content_of(folder) == expected(
        'Doc 1(Title: "Vale") A vale is a valley.\nDoc 2(Title: "Lune") The Lune is a river in England.\n'
    )


def test_documents_that_bring_their_contents_need_no_corpus(folder: Path) -> None:
    (folder / "cache.json").write_text(json.dumps({"what is the lune": [{"id": 9, "contents": '"A"\nb {question}'}]}))
    assert run_rag(folder, "--test_retrieval_cache", folder / "cache.json", "--topk", 1) == 0
    text = load_template("rag").text.replace("{context}", 'Doc 1(Title: "A") b {question}\n', 1)
    assert content_of(folder) == text.replace("{question}", "what is the lune?", 1), "a passage is no template"


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({}, "nothing is retrieved for 'what is the lune?'; start a retrieval server"),
        ({"what is the lune": [{"id": 0}]}, "1 documents for 'what is the lune?', but --topk asks for 2"),
        ({"what is the lune": [{"id": 0}, {"id": 7}]}, "corpus.jsonl has no passage with the id '7'"),
        ({"what is the lune": [{"id": 0}, "1"]}, "what is cached for 'what is the lune' is not a list of"),
        ([], "has to be an object"),
    ],
)
def test_a_cache_that_does_not_do(folder: Path, cache: object, message: str, capsys) -> None:
    assert run_rag(folder, *cached(folder, cache), "--topk", 2) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "o/test.parquet").exists()


def test_ids_without_a_corpus_and_no_cache_at_all(folder: Path, monkeypatch, capsys) -> None:
    arguments = cached(folder, {"what is the lune": [{"id": 0}]})
    assert run_rag(folder, *arguments[:2], "--topk", 1) == 2
    assert "pass the corpus they belong to by --corpus_path" in capsys.readouterr().err
    assert run_rag(folder) == 2
    assert "no cache is given, so: nothing is retrieved" in capsys.readouterr().err
    monkeypatch.setattr(retrieval_client, "_CHECK_DEADLINE_S", 0.3)
    assert run_rag(folder, "--retriever_url", "http://127.0.0.1:9/retrieve") == 1
    assert "http://127.0.0.1:9/retrieve" in capsys.readouterr().err


def test_what_is_not_cached_is_asked_of_a_server(folder: Path) -> None:
    rows = [
        {"id": str(number), "question": f"{word} {number}", "golden_answers": ["x"]}
        for number, word in enumerate(["town", "river", "valley", "river"])
    ]
    write_lines(folder / "qa/nq/test.jsonl", rows)
    arguments = cached(folder, {"river 3": [{"id": "1"}]})
    with served_corpus(folder / "corpus.jsonl") as url:
        assert run_rag(folder, *arguments, "--topk", 1, "--retriever_url", url) == 0
    contents = [row["prompt"][0]["content"] for row in pq.read_table(folder / "o/test.parquet").to_pylist()]
    titles = [content.partition("Doc 1(Title: ")[2].partition(")")[0] for content in contents]
    assert titles == ['"Osk"', '"Lune"', '"Vale"', '"Osk"']
