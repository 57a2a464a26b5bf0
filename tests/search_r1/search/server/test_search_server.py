"""The server as a client sees it, over real HTTP, and the version of its index. As a process: test_search_launch.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from search_corpora import corpus_of
from search_engines import Engine

from search_r1.http.gate import Metrics
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.hybrid import HybridRetriever
from search_r1.search.online import OnlineOptions, load_online
from search_r1.search.retrieval_server import load_service, parse_arguments
from search_r1.search.retriever import Retriever
from search_r1.search.server.retrieval_service import RetrievalService

_QUERIES = ["the river of Morn", "capital of Tarsia", "東京"]


def _post(server: str, **body: object) -> requests.Response:
    return requests.post(f"{server}/retrieve", json=body, timeout=60)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("return_scores", [True, False])
def test_answers_every_query_in_order_in_both_modes(
    small_server: str, corpus_file: Path, num_queries: int, return_scores: bool
) -> None:
    corpus = Corpus(corpus_file)
    queries = _QUERIES[:num_queries]
    found = Bm25Retriever.build(corpus).search(queries, 3)
    expected = [
        [{"document": corpus[hit.row], "score": hit.score} if return_scores else corpus[hit.row] for hit in hits]
        for hits in found
    ]
    reply = _post(small_server, queries=queries, topk=3, return_scores=return_scores)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json() == {"result": expected}
    assert all(expected)


@pytest.mark.parametrize("topk", [None, 0])
def test_topk_null_or_zero_is_the_servers_default(small_server: str, topk: int | None) -> None:
    queries = ["city country river"]
    assert len(_post(small_server, queries=queries, topk=topk).json()["result"][0]) == 2
    assert len(_post(small_server, queries=queries).json()["result"][0]) == 2
    assert len(_post(small_server, queries=queries, topk=1).json()["result"][0]) == 1
    assert len(_post(small_server, queries=queries, topk=100).json()["result"][0]) == 3


def test_single_query_field_of_skyrl(small_server: str) -> None:
    as_list = _post(small_server, queries=["Morn"], topk=2, return_scores=True).json()
    assert _post(small_server, query="Morn", topk=2, return_scores=True).json() == as_list
    assert _post(small_server, query=["Morn"], topk=2, return_scores=True).json() == as_list


def test_empty_lists_and_queries_without_a_match(small_server: str) -> None:
    assert _post(small_server, queries=[], topk=3, return_scores=True).json() == {"result": []}
    assert _post(small_server, queries=["", " ", "zyxxy", "Morn"], topk=1).json()["result"][:3] == [[], [], []]


def test_agent_tags_never_leave_the_server(small_server: str) -> None:
    (hits,) = _post(small_server, queries=["volcano"]).json()["result"]
    assert hits[0]["contents"] == '"Trap"\nThe volcano Paris erupted.'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'send "queries"'),
        ({"queries": "Morn"}, "queries: Input should be a valid array"),
        ({"queries": ["a", 3]}, "queries.1: Input should be a valid string"),
        ({"queries": ["a"], "topk": -1}, "topk: Input should be greater than or equal to 0"),
        ({"queries": ["a"], "topk": 101}, "topk: Input should be less than or equal to 100"),
        ({"queries": ["a"] * 4097}, "queries: List should have at most 4096 items"),
        ({"queries": ["a" * 32_769]}, "queries.0: String should have at most 32768 characters"),
    ],
)
def test_bad_requests_say_what_is_wrong(small_server: str, body: dict, message: str) -> None:
    reply = _post(small_server, **body)
    assert reply.status_code == 422
    assert message in reply.json()["detail"] and len(reply.text) < 500


def test_bodies_that_are_no_json_or_too_large(small_server: str) -> None:
    url = f"{small_server}/retrieve"
    reply = requests.post(url, data=b"{queries", timeout=60)
    assert reply.status_code == 422 and "Invalid JSON" in reply.json()["detail"]
    chunks = (b"x" * (1 << 20) for _ in range(33))  # chunked: there is no Content-Length to trust
    reply = requests.post(url, data=chunks, timeout=60)
    assert reply.status_code == 413 and "send less at once" in reply.json()["detail"]


@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        ("/retrieve", {"queries": ["Morn"], "top_k": 5}, 'top_k: unknown field; the nearest of .* is "topk"'),
        ("/retrieve", {"query": "Morn", "return_score": True}, 'return_score: .* is "return_scores"'),
        ("/retrieve", {"quries": ["Morn"]}, 'quries: .* is "queries"'),
        ("/search", {"query": "Morn", "topn": 5}, 'topn: .*query, top_n, return_score is "top_n"'),
        ("/batch_search", {"query": ["Morn"], "return_scores": True}, 'return_scores: .* is "return_score"'),
    ],
)
def test_an_unknown_field_is_refused_by_the_name_of_the_nearest(
    small_server: str, route: str, body: dict, told: str
) -> None:
    reply = requests.post(small_server + route, json=body, timeout=60)
    assert reply.status_code == 422 and re.search(told, reply.json()["detail"]), reply.text


def test_health_says_what_is_served(small_server: str) -> None:
    reply = requests.get(f"{small_server}/healthz", timeout=60)
    served = {"retriever": "bm25", "corpus_size": 5, "topk": 2, "index_version": reply.json()["index_version"]}
    assert reply.json() == {"status": "ok"} | served
    health = requests.get(f"{small_server}/health", timeout=60).json()
    assert health == {"status": "healthy", "retrievers": {"total": 1, "available": 1}}
    info = requests.get(f"{small_server}/info", timeout=60).json()
    limits = {"queries": 4096, "query_chars": 32768, "topk": 100, "body_bytes": 32 << 20}
    assert info == served | {"batch_size": None, "limits": limits}


def test_the_interface_is_published(small_server: str) -> None:
    paths = requests.get(f"{small_server}/openapi.json", timeout=60).json()["paths"]
    assert {"/retrieve", "/search", "/batch_search", "/health", "/healthz", "/readyz", "/metrics", "/info"} <= set(
        paths
    )
    schema = paths["/retrieve"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"queries", "query", "topk", "return_scores"}
    assert {"200", "422", "503", "504"} <= set(paths["/batch_search"]["post"]["responses"])
    assert requests.get(f"{small_server}/docs", timeout=60).status_code == 200


def test_without_its_flag_there_is_no_mcp_tool(small_server: str) -> None:
    assert requests.post(f"{small_server}/mcp", json={}, timeout=60).status_code == 404


def test_a_burst_of_threads_gets_the_answers_that_one_gets(small_server: str) -> None:
    queries = [f"{word} {number % 7}" for number, word in enumerate(["Morn", "Tarsia", "river", "singer"] * 32)]
    alone = {query: _post(small_server, queries=[query], return_scores=True).json() for query in set(queries)}
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda query: _post(small_server, queries=[query], return_scores=True), queries))
    assert [reply.json() for reply in together] == [alone[query] for query in queries]
    at_once = _post(small_server, queries=queries, return_scores=True).json()["result"]
    assert at_once == [alone[query]["result"][0] for query in queries]


def test_the_largest_published_request_is_answered(small_server: str) -> None:
    reply = _post(small_server, queries=[f"Morn {number}" for number in range(2560)], topk=3, return_scores=True)
    result = reply.json()["result"]
    assert len(result) == 2560 and all(hits[0]["document"]["id"] == "p20" for hits in result)


def test_a_row_that_breaks_under_a_running_server_is_an_error_not_an_empty_result(
    serve, tmp_path: Path, corpus_file: Path
) -> None:
    Bm25Retriever.build(Corpus(corpus_file)).save(tmp_path / "bm25")
    server = serve(
        "--corpus_path", str(corpus_file), "--index_path", str(tmp_path / "bm25"), "--retriever_name", "bm25"
    )
    text = corpus_file.read_bytes()
    with corpus_file.open("r+b") as file:  # same inode and length: the server maps this file
        file.write(text.replace(b'{"id": "p10"', b'["id": "p10"', 1))
    reply = _post(server, queries=["Anna"])
    assert reply.status_code == 500 and f"{corpus_file}, line 1" in reply.json()["detail"]
    assert _post(server, queries=["capital"]).json()["result"][0][0]["id"] == "p50"


def test_real_wikipedia_over_http(serve, wiki_mini: Path, wiki_index: Path) -> None:
    server = serve("--corpus_path", str(wiki_mini), "--index_path", str(wiki_index), "--retriever_name", "bm25")
    assert requests.get(f"{server}/healthz", timeout=60).json()["corpus_size"] == 22_953
    (hits,) = _post(server, queries=["Who was the brother of Lambert, Margrave of Tuscany?"]).json()["result"]
    assert len(hits) == 3 and hits[0]["contents"].startswith('"Lambert, Margrave of Tuscany"\n')
    with wiki_mini.open(encoding="utf-8") as file:
        rows = {row["id"]: row for row in map(json.loads, file)}
    assert all(rows[hit["id"]] == hit for hit in hits)


# --- the version of the index: the same for the same content, another one for any other


def _version(corpus: Corpus, make: Callable[[Corpus], Retriever] = Bm25Retriever.build) -> str:
    service = RetrievalService(make(corpus), corpus)
    service.close()
    return service.version


def test_it_depends_on_all_of_the_corpus_and_on_the_retriever(tmp_path: Path) -> None:
    rows = [f"row {number} says alpha" for number in range(5000)]
    version = _version(corpus_of(tmp_path / "a", *rows))
    assert version == _version(corpus_of(tmp_path / "elsewhere", *rows))
    # one letter of one row of five thousand: the file is as long, and indexes know their corpus by a sample of rows
    for number in (100, 101):  # of two neighbours at most one is in the sample
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
