"""The cache, the routes of other projects, tokens, probes, metrics and the stop, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e_world import free_port
from search_scheduling import GatedRetriever, scores, staged
from search_servers import PATIENCE_S, running_app, wait_until

from search_r1.http import routes
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.app import AppOptions
from search_r1.search.server.cache import HitsCache
from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions
from search_r1.search.server.source_interface import EncodedHit

_TOKEN = "s3cret-t0ken"


def _post(url: str, **body: object) -> requests.Response:
    return requests.post(url, json=body, timeout=PATIENCE_S)


# --- the cache


def test_a_repeated_query_is_not_run_again(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file) as stage:
        stage.retriever.open()
        assert scores(stage.ask("q 1", "q 2")) == [1.0, 2.0]
        assert scores(stage.ask("q 2", " q\n 1 ", "q 3")) == [2.0, 1.0, 3.0]
        assert stage.retriever.batches == [["q 1", "q 2"], ["q 3"]]
        assert stage.ask("q 1", topk=2).status_code == 200  # another k is another question
        assert stage.retriever.batches[2:] == [["q 1"]] and stage.retriever.ks == [1, 1, 2]
        assert stage.value("retrieval_cache_hits_total") == 2 and stage.value("retrieval_cache_misses_total") == 4
        assert stage.value("retrieval_cache_bytes") > 0


def test_without_a_cache_every_query_is_run(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file, cache_mib=0) as stage:
        stage.retriever.open()
        assert [scores(stage.ask("q 1")) for _ in range(2)] == [[1.0], [1.0]]
        assert stage.retriever.batches == [["q 1"]] * 2


def test_an_answer_that_nobody_waited_for_any_more_is_kept(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file) as stage:
        with stage.client_that_leaves("q 1"):
            stage.wait_for_batches(1)
        stage.retriever.open()
        wait_until(lambda: stage.value("retrieval_batch_queries_count") == 1)
        assert scores(stage.ask("q 1")) == [1.0]
        assert stage.retriever.batches == [["q 1"]]


def test_the_cache_is_bounded_in_bytes_and_forgets_the_least_used() -> None:
    def answer(size: int) -> tuple[EncodedHit, ...]:
        return (EncodedHit(b"x" * size, 1.0),)

    cache = HitsCache(10_000, "index")
    for name in ("a", "b", "c"):
        cache.put(name, 3, answer(2_500))
    assert cache.get("a", 3) == answer(2_500)  # used last: "b" goes first
    cache.put("d", 3, answer(2_500))
    assert cache.get("b", 3) is None and cache.get("a", 3) and cache.get("c", 3) and cache.get("d", 3)
    cache.put("e", 3, answer(20_000))
    assert cache.get("e", 3) is None and cache.num_bytes <= 10_000
    assert cache.get("a", 4) is None
    for number in range(10):
        cache.put(str(number) * 3_000, 3, ())
    kept = [number for number in range(10) if cache.get(str(number) * 3_000, 3) is not None]
    assert kept == [8, 9] and cache.num_bytes <= 10_000, "a long query takes room, too"


# --- routes of FlashRAG, ReSearch and ReCall


def test_search_and_batch_search_as_flashrag_serves_them(small_server: str, corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    queries = ["city country river", "capital", "zyxxy"]
    found = Bm25Retriever.build(corpus).search(queries, 2)
    documents = [[corpus[hit.row] for hit in hits] for hits in found]
    expected_scores = [[hit.score for hit in hits] for hits in found]
    one, many = f"{small_server}/search", f"{small_server}/batch_search"
    assert [len(hits) for hits in found] == [2, 1, 0]
    assert _post(one, query=queries[0], top_n=2).json() == documents[0]
    assert _post(one, query=queries[0], top_n=2, return_score=True).json() == [documents[0], expected_scores[0]]
    assert _post(many, query=queries, top_n=2).json() == documents
    assert _post(many, query=queries, top_n=2, return_score=True).json() == [documents, expected_scores]
    assert _post(many, query=[]).json() == [] and _post(many, query=[], return_score=True).json() == [[], []]
    assert len(_post(one, query=queries[0]).json()) == 3  # ten by default, three rows match


@pytest.mark.parametrize("query", ["", " \n"])
def test_an_empty_query_is_400_for_search_only(small_server: str, query: str) -> None:
    reply = _post(f"{small_server}/search", query=query)
    assert reply.status_code == 400 and reply.json() == {"detail": "Query content cannot be empty"}
    assert _post(f"{small_server}/batch_search", query=[query, "capital"]).json()[0] == []


@pytest.mark.parametrize("route", ["search", "batch_search"])
@pytest.mark.parametrize("body", [{}, {"query": 3}, {"query": "a", "top_n": 0}, {"query": ["a"], "top_n": 101}])
def test_bad_requests_of_flashrag_are_422(small_server: str, route: str, body: dict[str, Any]) -> None:
    reply = _post(f"{small_server}/{route}", **body)
    assert reply.status_code == 422 and reply.json()["detail"]


# --- probes, metrics, documents


def test_ready_once_the_warm_up_query_has_run(corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    retriever = GatedRetriever(len(corpus))
    with running_app(create_app(RetrievalService(retriever, corpus))) as (url, _):
        wait_until(lambda: len(retriever.batches) == 1)
        assert retriever.batches == [['"Anna Velt" Anna Velt was born in the']]
        waiting = requests.get(f"{url}/readyz", timeout=PATIENCE_S)
        assert waiting.status_code == 503
        assert waiting.json() == {"status": "the warm-up query has not run yet"}
        assert requests.get(f"{url}/healthz", timeout=PATIENCE_S).status_code == 200
        assert requests.get(f"{url}/health", timeout=PATIENCE_S).json()["retrievers"] == {"total": 1, "available": 0}
        retriever.open()  # the words of the warm-up query end in no number: it fails
        wait_until(lambda: "failed" in requests.get(f"{url}/readyz", timeout=PATIENCE_S).json()["status"])


def test_metrics_count_requests_by_route_and_status(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file) as stage:
        stage.retriever.open()
        stage.ask("q 1")
        stage.ask("q 1", topk=-1)
        requests.get(f"{stage.url}/made/up", timeout=PATIENCE_S)
        text = requests.get(f"{stage.url}/metrics", timeout=PATIENCE_S)
    assert text.headers["content-type"].startswith("text/plain")
    for line in (
        'retrieval_requests_total{route="/retrieve",status="200"} 1.0',
        'retrieval_requests_total{route="/retrieve",status="422"} 1.0',
        'retrieval_requests_total{route="other",status="404"} 1.0',
        'retrieval_request_seconds_count{route="/retrieve"} 2.0',
        "retrieval_queue_queries 0.0",
    ):
        assert line in text.text.splitlines()
    assert "made" not in text.text and "process_resident_memory_bytes" in text.text


# --- the token


def test_nothing_but_the_token_as_a_bearer_is_taken(run_app, corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    service = RetrievalService(Bm25Retriever.build(corpus), corpus)
    url = run_app(create_app(service, AppOptions(auth_token=_TOKEN)))
    body = {"queries": ["capital"]}
    wrong = ("Bearer", f"Bearer {_TOKEN}x", f"Bearer {_TOKEN[:-1]}", f"Basic {_TOKEN}", _TOKEN, "Bearer \xff")
    for given in (None, *wrong):
        headers = {"Authorization": given.encode("latin-1")} if given else {}
        refused = requests.post(f"{url}/retrieve", json=body, headers=headers, timeout=PATIENCE_S)
        assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
        assert _TOKEN not in refused.text
    for given in (f"Bearer {_TOKEN}", f"bearer {_TOKEN}"):
        answered = requests.post(f"{url}/retrieve", json=body, headers={"Authorization": given}, timeout=PATIENCE_S)
        assert answered.status_code == 200
    service.close()


# --- the stop


def test_a_stopping_server_finishes_what_runs_and_refuses_what_is_new(corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    retriever = GatedRetriever(len(corpus))
    service = RetrievalService(retriever, corpus, ServiceOptions(max_wait_ms=0))
    body = {"queries": ["q 2"], "topk": 1, "return_scores": True}
    with running_app(create_app(service)) as (url, server), ThreadPoolExecutor(1) as pool:
        wait_until(lambda: len(retriever.batches) == 1)  # the warm-up query
        running = pool.submit(requests.post, f"{url}/retrieve", json=body, timeout=PATIENCE_S)
        wait_until(lambda: (service.metrics.registry.get_sample_value("retrieval_queue_queries") or 0) == 1)
        server.should_exit = True
        wait_until(
            lambda: requests.get(f"{url}/readyz", timeout=PATIENCE_S).json()["status"] == "the server is stopping"
        )
        refused = requests.post(f"{url}/retrieve", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
        assert requests.get(f"{url}/health", timeout=PATIENCE_S).json()["retrievers"]["available"] == 0
        retriever.open()
        assert scores(running.result()) == [2.0]


def test_sigterm_waits_for_a_request_that_is_still_being_sent(start_process, corpus_file: Path) -> None:
    """And the token, which comes from the environment here, is asked for and is not logged."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "search_r1.search.retrieval_server", "--retriever_name", "bm25"]
    command += ["--corpus_path", str(corpus_file), "--port", str(port)]
    process = start_process(command, port, RETRIEVAL_AUTH_TOKEN=_TOKEN)
    assert _post(f"{url}/retrieve", queries=["capital"]).status_code == 401
    body = json.dumps({"queries": ["capital"]}).encode()
    fields = f"Host: x\r\nAuthorization: Bearer {_TOKEN}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(f"POST /retrieve HTTP/1.1\r\n{fields}\r\n".encode() + body[:5])
        requests.get(f"{url}/healthz", timeout=PATIENCE_S)  # what was sent before has arrived
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: requests.get(f"{url}/readyz", timeout=PATIENCE_S).status_code == 503)
        client.sendall(body[5:])
        answer = b"".join(iter(lambda: client.recv(65_536), b""))
    assert answer.startswith(b"HTTP/1.1 200") and b'"p50"' in answer
    _, log = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and "Traceback" not in log and _TOKEN not in log


def test_the_service_is_a_source_of_passages(corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    service = RetrievalService(Bm25Retriever.build(corpus), corpus)
    (hits,) = Bm25Retriever.build(corpus).search(["river of Morn"], 3)
    found = asyncio.run(service.search(["river of Morn", " "], 3))
    service.close()
    assert found == [[(corpus[hit.row], hit.score) for hit in hits], []] and hits
    assert service.name == "bm25" and service.num_passages == 5


def test_many_large_uploads_are_refused_until_one_of_them_ends(
    run_app, corpus_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_BODIES_BYTES", 100_000)
    with staged(run_app, corpus_file) as stage:
        stage.retriever.open()
        address = ("127.0.0.1", int(stage.url.rpartition(":")[2].partition("/")[0]))
        held = 60_000
        with socket.create_connection(address) as slow:
            head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {held + 1}\r\n\r\n"
            slow.sendall(head.encode() + b" " * held)
            wait_until(lambda: routes.Bodies.total == held)
            body = b" " * 50_000 + b'{"queries": ["1"]}'
            refused = requests.post(f"http://{address[0]}:{address[1]}/retrieve", data=body, timeout=PATIENCE_S)
            assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
            assert "100000 bytes" in refused.json()["detail"]
        wait_until(lambda: routes.Bodies.total == 0)
        answered = requests.post(f"http://{address[0]}:{address[1]}/retrieve", data=body, timeout=PATIENCE_S)
        assert answered.status_code == 200
    assert routes.Bodies.total == 0


def test_ctrl_c_while_it_loads_ends_it_without_a_traceback() -> None:
    program = (
        "import signal, sys\n"
        "from search_r1.search import retrieval_server\n"
        "retrieval_server._load = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(retrieval_server.main(['--port', '0', '--retriever_name', 'bm25']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stderr) == (130, "")
