"""One query of 64 cannot be answered: the real client in front of real servers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fastapi import FastAPI, Request, Response
from search_clients import Peer, until, with_client
from search_engines import Engine
from search_scheduling import Stage, staged
from search_servers import wait_until

from search_r1.errors import RetrieverError, RetrieverQueryFailed, RetrieverRejected, RetrieverUnavailable
from search_r1.search.client import RetrievalClient
from search_r1.search.online import transport

_GOOD = [f"q {number}" for number in range(63)]
_FAILURES = {"text": Response("Internal Replica Error", 500), "json": Response('{"detail": "CUDA error"}', 500)}
each_failure = pytest.mark.parametrize("failure", _FAILURES.values(), ids=_FAILURES)


class PublishedServer(Peer):
    """The published server's manners: a query that it cannot answer is HTTP 500 for the whole list."""

    def __init__(self, failure: Response) -> None:
        super().__init__()
        self.failure, self.poison = failure, True

    def step(self, queries: list[str]) -> Response | float:
        return self.failure if self.poison and any(query.startswith("poison") for query in queries) else 0.0

    @property
    def lists(self) -> list[list[str]]:
        return [body["queries"] for body in self.requests]


def _search(url: str, queries: list[str], **options: Any) -> tuple[list[Any], list[str]]:
    """What became of each query, searched at once by one client, and the queries in the order in which they ended."""
    ended: list[str] = []

    async def one(client: RetrievalClient, query: str) -> Any:
        try:
            return await client.search(query)
        except RetrieverError as error:
            return error
        finally:
            ended.append(query)

    async def all_at_once(client: RetrievalClient) -> list[Any]:
        return await asyncio.gather(*(one(client, query) for query in queries))

    return with_client(f"{url}/retrieve", all_at_once, topk=1, **options), ended


def _with_poison() -> list[str]:
    return [*_GOOD[:30], "poison", *_GOOD[30:]]


def _check_that_only_the_poison_failed(outcomes: list[Any], ended: list[str]) -> RetrieverError:
    found = dict(zip(_with_poison(), outcomes, strict=True))
    failed = found.pop("poison")
    assert all(isinstance(passages, list) and passages for passages in found.values())
    assert ended[-1] == "poison"  # nobody waited for it
    return failed


@pytest.fixture
def stage(run_app, corpus_file: Path) -> Iterator[Stage]:
    with staged(run_app, corpus_file, cache_mib=0) as stage:
        stage.retriever.open()
        yield stage


def test_the_others_are_answered_by_the_first_request_and_searched_once(stage: Stage) -> None:
    outcomes, ended = _search(stage.url, _with_poison())
    failed = _check_that_only_the_poison_failed(outcomes, ended)
    assert isinstance(failed, RetrieverQueryFailed)
    assert "the gated retriever failed: RuntimeError: a poisoned query" in str(failed)
    assert stage.value("retrieval_requests_total", route="/retrieve", status="200") == 5  # 64, then the poison alone
    assert stage.value("retrieval_requests_total", route="/retrieve", status="500") is None
    answered_alone = Counter(batch[0] for batch in stage.retriever.batches if len(batch) == 1)
    assert answered_alone["poison"] == 5
    assert stage.value("retrieval_failed_queries_total") == 5


def test_who_does_not_ask_for_the_errors_of_queries_gets_the_published_shape(stage: Stage) -> None:
    each = {"X-Query-Errors": "each"}
    assert stage.ask("q 1", "poison").status_code == 500
    good = stage.ask("q 1", "q 2")
    assert good.content == stage.ask("q 1", "q 2", headers=each).content and set(good.json()) == {"result"}
    mixed = stage.ask("q 1", "poison", "q 2", headers=each)
    assert mixed.status_code == 200
    result, errors = mixed.json()["result"], mixed.json()["errors"]
    assert (result[0][0]["score"], result[1], result[2][0]["score"]) == (1.0, None, 2.0)
    detail = "the gated retriever failed: RuntimeError: a poisoned query"
    assert errors == {"1": {"status": 500, "detail": detail}}


@each_failure
def test_a_foreign_server_that_fails_the_list_is_asked_for_halves(run_app, failure: Response) -> None:
    peer = PublishedServer(failure)
    outcomes, ended = _search(run_app(peer.app), _with_poison())
    failed = _check_that_only_the_poison_failed(outcomes, ended)
    assert isinstance(failed, RetrieverQueryFailed) and "HTTP 500" in str(failed)
    assert len(peer.lists) <= 13 + 4  # six times two halves; then the poison alone
    asked_after = Counter(query for queries in peer.lists for query in queries if "poison" not in queries)
    assert asked_after == dict.fromkeys(_GOOD, 1)


@each_failure
def test_queries_that_always_fail_do_not_open_the_circuit(
    run_app, failure: Response, caplog: pytest.LogCaptureFixture
) -> None:
    peer = PublishedServer(failure)

    async def act(client: RetrievalClient) -> None:
        """Four of them, which nothing is answered between: a sick server's circuit opens after three failures."""
        bad = [asyncio.ensure_future(client.search(f"poison {number}")) for number in range(4)]
        await until(lambda: all([f"poison {number}"] in peer.lists for number in range(4)))
        assert (await client.search("q 1"))[0]["contents"] == "about q 1"
        assert all(isinstance(one, RetrieverQueryFailed) for one in await asyncio.gather(*bad, return_exceptions=True))

    with_client(f"{run_app(peer.app)}/retrieve", act)
    assert "failed 3 times in a row" not in caplog.text


def test_a_query_that_fails_for_a_while_is_answered_then(run_app) -> None:
    peer = PublishedServer(Response("Internal Replica Error", 500))
    timer = threading.Timer(0.5, setattr, (peer, "poison", False))
    timer.start()
    outcomes, _ = _search(run_app(peer.app), ["poison"])
    timer.join()
    assert outcomes[0][0]["contents"] == "about poison"


@pytest.fixture
def online(run_app, serve) -> Callable[..., str]:
    """`online(engine, *arguments)`: the address of a retrieval server over the engine."""

    def start(engine: Engine, *arguments: str) -> str:
        endpoint = ("--retriever_name", "serper", "--online_endpoint", f"{run_app(engine.app)}/engine")
        return serve(*endpoint, *arguments, SERPER_API_KEY="a-key-of-the-tests")

    return start


def test_an_online_engine_is_paid_once_for_each_query(online) -> None:
    engine = Engine("serper")
    queries = [*_GOOD, "refused"]
    url = online(engine)
    outcomes, _ = _search(url, queries)
    assert isinstance(outcomes[-1], RetrieverRejected) and outcomes[-1].status == 424
    assert "HTTP 403: no" in str(outcomes[-1])
    assert all(isinstance(outcome, list) and outcome for outcome in outcomes[:-1])
    assert Counter(engine.asked) == dict.fromkeys(queries, 1)
    again, _ = _search(url, _GOOD)
    assert again == outcomes[:-1] and len(engine.asked) == 64  # kept without a file


def test_a_query_that_an_engine_never_answers_costs_the_others_nothing(online, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_FIRST_PAUSE_S", 0.05)
    engine = Engine("serper")
    outcomes, ended = _search(online(engine), [*_GOOD, "down"], deadline_s=3.0)
    assert isinstance(outcomes[-1], RetrieverUnavailable) and "HTTP 500: down" in str(outcomes[-1])
    assert ended[-1] == "down"
    asked = Counter(engine.asked)
    assert asked.pop("down") > 1 and asked == dict.fromkeys(_GOOD, 1)


def test_more_queries_than_the_rate_has_room_for_are_told_when_to_come_and_paid_once(online) -> None:
    engine = Engine("serper")
    queries = [f"slow {number}" for number in range(24)]
    url = online(engine, "--online_per_second", "8")
    outcomes, _ = _search(url, queries, timeout_s=1.0, deadline_s=60.0)
    assert all(isinstance(outcome, list) for outcome in outcomes)
    assert Counter(engine.asked) == dict.fromkeys(queries, 1)
    assert max(engine.times) - min(engine.times) >= (24 - 8) / 8 - 0.25  # longer than an attempt waits


def test_a_query_whose_turn_comes_too_late_is_not_asked(online) -> None:
    engine = Engine("serper")
    url = online(engine, "--online_per_second", "0.2")
    body = {"queries": ["first", "second", "third"], "topk": 1, "return_scores": True}
    headers = {"X-Deadline-Ms": "2000", "X-Query-Errors": "each"}
    reply = requests.post(f"{url}/retrieve", json=body, headers=headers, timeout=60)
    assert reply.headers["X-Batch-Size"] == "1"
    result, errors = reply.json()["result"], reply.json()["errors"]
    assert result[0] and result[1:] == [None, None] and engine.asked == ["first"]
    assert [errors[number]["status"] for number in ("1", "2")] == [503, 503]
    assert all(3.0 < errors[number]["retry_after_s"] < 10.0 for number in ("1", "2"))
    assert "got no request: this query could be sent in about " in errors["1"]["detail"]
    assert ", at 0.2 requests per second" in errors["1"]["detail"]


def test_the_answer_to_a_client_that_has_gone_is_kept_for_its_retry(online) -> None:
    engine = Engine("serper")
    engine.door.clear()
    url = online(engine)
    body, port = b'{"query": "late"}', int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: engine.running == 1)
    wait_until(lambda: "retrieval_gone_total 1.0" in requests.get(f"{url}/metrics", timeout=60).text)
    engine.door.set()
    assert requests.post(f"{url}/retrieve", json={"query": "late"}, timeout=60).json()["result"][0]
    assert engine.asked == ["late"]


def test_lists_are_as_long_as_the_server_says(run_app) -> None:
    lists: list[int] = []
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        queries = json.loads(await request.body())["queries"]
        lists.append(len(queries))
        body = json.dumps({"result": [[{"contents": "x"}]] * len(queries)})
        return Response(body, headers={"X-Batch-Size": "5"})

    async def act(client: RetrievalClient) -> None:
        await client.check()
        await asyncio.gather(*map(client.search, _GOOD[:12]))

    with_client(f"{run_app(app)}/retrieve", act)
    assert lists[0] == 1 and sorted(lists[1:]) == [2, 5, 5]  # sent at the same time, they come in any order
