"""What a server says of its index: the same for the same content, another one for any other, on every route."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from search_corpora import corpus_of
from search_engines import Engine

from search_r1.http.metrics import Metrics
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.hybrid import HybridRetriever
from search_r1.search.online import OnlineOptions, load_online
from search_r1.search.retrieval_server import load_service, parse_arguments
from search_r1.search.retriever import Retriever
from search_r1.search.server.retrieval_service import RetrievalService


def _version(corpus: Corpus, make: Callable[[Corpus], Retriever] = Bm25Retriever.build) -> str:
    service = RetrievalService(make(corpus), corpus)
    service.close()
    return service.version


def test_it_depends_on_all_of_the_corpus_and_on_the_retriever(tmp_path: Path) -> None:
    rows = [f"row {number} says alpha" for number in range(5000)]
    version = _version(corpus_of(tmp_path / "a", *rows))
    assert version == _version(corpus_of(tmp_path / "elsewhere", *rows))
    # one letter of one row of five thousand: the file is as long, and indexes know their corpus by a sample of rows
    for number in range(100, 104):
        changed = [*rows[:number], rows[number].replace("alpha", "alphz"), *rows[number + 1 :]]
        assert _version(corpus_of(tmp_path / "b", *changed)) != version
    corpus = corpus_of(tmp_path / "a", *rows)
    assert _version(corpus, lambda opened: Bm25Retriever.build(opened, k1=1.2)) != version
    hybrid = _version(corpus, lambda opened: HybridRetriever([Bm25Retriever.build(opened)] * 2))
    assert hybrid not in (version, _version(corpus, lambda opened: HybridRetriever([Bm25Retriever.build(opened)] * 3)))


def test_an_index_that_was_saved_is_the_one_that_was_built(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "a", "alpha", "beta")
    Bm25Retriever.build(corpus).save(tmp_path / "bm25")
    arguments = ["--corpus_path", str(corpus.path), "--retriever_name", "bm25"]
    versions = set()
    for more in ([], ["--index_path", str(tmp_path / "bm25")], ["--max_batch", "3", "--cache_size", "0"]):
        service = load_service(parse_arguments([*arguments, *more]), Metrics())
        versions.add(service.version)
        service.close()
    assert len(versions) == 1


def test_an_engine_has_the_version_of_what_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "a-key-of-the-tests")
    monkeypatch.setenv("BRAVE_API_KEY", "a-key-of-the-tests")

    def version(name: str = "serper", **options: Any) -> str:
        return load_online(name, OnlineOptions(**options)).version

    alike = {version(), version(per_second=2.0), version(cache_mode="off")}
    others = [version("brave"), version(fields={"gl": "us"}), version(deny=("a.org",)), version(endpoint="http://b")]
    assert len(alike) == 1 and len(set(others) | alike) == 5


def test_every_reply_says_it(small_server: str, run_app, serve, corpus_file: Path) -> None:
    expected = _version(Corpus(corpus_file))
    for route in ("/info", "/healthz"):
        assert requests.get(small_server + route, timeout=60).json()["index_version"] == expected
    for route, body in (("/retrieve", {"query": "Morn"}), ("/search", {"query": "Morn"})):
        reply = requests.post(small_server + route, json=body, timeout=60)
        assert reply.headers["X-Index-Version"] == expected and "X-Batch-Size" not in reply.headers
    engine = Engine("serper")
    endpoint = ("--retriever_name", "serper", "--online_endpoint", f"{run_app(engine.app)}/engine")
    online = serve(*endpoint, SERPER_API_KEY="a-key-of-the-tests")
    info = requests.get(f"{online}/info", timeout=60).json()
    reply = requests.post(f"{online}/retrieve", json={"query": "lune"}, timeout=60)
    assert reply.headers["X-Index-Version"] == info["index_version"]
    assert reply.headers["X-Batch-Size"] == str(info["batch_size"]) == "50"
