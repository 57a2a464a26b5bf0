"""The client in front of several real servers: some die, hang, answer 503, come back."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import uvicorn
from e2e_world import free_port
from fastapi import FastAPI, Request, Response

from search_r1.errors import RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.search.client import RetrievalClient
from search_r1.search.client import replicas as routing
from search_r1.search.client.replicas import ReplicaPool


class Peer:
    """A server that can be stopped and started on its port. `answer` is None, a response or an event to wait for."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.answer: Response | threading.Event | None = None
        self.app = FastAPI()
        self.app.post("/retrieve")(self._retrieve)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self.start()

    def start(self) -> None:
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.thread.join(timeout=30)

    async def _retrieve(self, request: Request) -> Response:
        self.requests.append(request)  # also where the client has left by now
        body = json.loads(await request.body())
        if isinstance(self.answer, Response):
            return self.answer
        while self.answer is not None and not self.answer.is_set():
            await asyncio.sleep(0.005)
        result = [[{"document": {"contents": f"{query} by {self.port}"}, "score": 1.0}] for query in body["queries"]]
        return Response(json.dumps({"result": result}), media_type="application/json")


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made = [Peer(), Peer()]
    yield made
    for peer in made:
        peer.stop()


def _run(url: str | Sequence[str], act: Callable[[RetrievalClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        client = RetrievalClient(url, **{"deadline_s": 60.0} | options)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def _one_by_one(client: RetrievalClient, number: int) -> list[str]:
    return [(await client.search(f"q{n}"))[0]["contents"].rpartition(" ")[2] for n in range(number)]


def _ports(peers: list[Peer]) -> list[str]:
    return [str(peer.port) for peer in peers]


def test_healthy_servers_take_turns(peers: list[Peer]) -> None:
    urls = [peer.url for peer in peers]
    for url in (urls, ",".join(urls), f" {urls[0]} , {urls[1]},"):
        answered = _run(url, lambda client: _one_by_one(client, 6))
        assert Counter(answered) == dict.fromkeys(_ports(peers), 3)


def test_a_busy_server_gets_less(peers: list[Peer]) -> None:
    peers[0].answer = door = threading.Event()

    async def act(client: RetrievalClient) -> None:
        slow = asyncio.ensure_future(client.search("first"))
        while not peers[0].requests:
            await asyncio.sleep(0.01)
        await _one_by_one(client, 5)
        door.set()
        await slow

    _run([peer.url for peer in peers], act)
    assert [len(peer.requests) for peer in peers] == [1, 5]


def test_a_dead_server_costs_no_search_and_is_left_alone(
    peers: list[Peer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)
    peers[0].stop()
    answered = _run([peer.url for peer in peers], lambda client: _one_by_one(client, 12))
    assert answered == [str(peers[1].port)] * 12
    assert caplog.text.count(f"{peers[0].url} failed 3 times in a row") == 1


@pytest.mark.parametrize("status", [503, 500, None], ids=["503", "500", "hangs"])
def test_a_broken_server_is_asked_three_times_and_no_more(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)
    peers[0].answer = Response("broken", status) if status else threading.Event()
    timeout_s = 10.0 if status else 1.0
    answered = _run([peer.url for peer in peers], lambda client: _one_by_one(client, 12), timeout_s=timeout_s)
    assert answered == [str(peers[1].port)] * 12
    assert len(peers[0].requests) == 3


def test_a_server_that_comes_back_is_found_by_one_probe(peers: list[Peer], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ports = _ports(peers)
    peers[0].stop()

    async def act(client: RetrievalClient) -> None:
        assert set(await _one_by_one(client, 8)) == {ports[1]}
        await asyncio.to_thread(peers[0].start)
        end = time.monotonic() + 60
        while (await _one_by_one(client, 1))[0] != ports[0]:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        assert Counter(await _one_by_one(client, 6)) == dict.fromkeys(ports, 3)

    _run([peer.url for peer in peers], act)
    assert f"{peers[0].url} answers again" in caplog.text


def test_retry_after_sends_the_search_elsewhere_and_is_no_failure(peers: list[Peer]) -> None:
    peers[0].answer = Response('{"detail": "full"}', 503, headers={"Retry-After": "1000"})
    answered = _run([peer.url for peer in peers], lambda client: _one_by_one(client, 6))
    assert answered == [str(peers[1].port)] * 6
    assert len(peers[0].requests) == 1


def test_all_servers_down_until_the_deadline_then_one_returns(
    peers: list[Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for peer in peers:
        peer.stop()
    urls = [peer.url for peer in peers]
    with monkeypatch.context() as patch, pytest.raises(RetrieverUnavailable) as caught:
        patch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)  # no last attempt that the deadline cuts short
        _run(urls, lambda client: client.search("q"), deadline_s=1.5)
    assert all(url in str(caught.value) for url in urls) and "ClientConnectorError" in str(caught.value)

    async def act(client: RetrievalClient) -> list[str]:
        waiting = asyncio.ensure_future(_one_by_one(client, 2))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(peers[1].start)
        return await waiting

    assert _run(urls, act) == [str(peers[1].port)] * 2


def test_many_searches_wait_for_one_probe_of_a_broken_server(peers: list[Peer]) -> None:
    peers[0].answer = Response("broken", 500)

    async def act(client: RetrievalClient) -> None:
        searches = [asyncio.ensure_future(client.search(f"q{n}")) for n in range(40)]
        await asyncio.sleep(2.0)
        # 40 requests leave at once; after them only probes, at least 0.25 s and then twice as long apart
        assert len(peers[0].requests) < 60
        peers[0].answer = None
        assert len(await asyncio.gather(*searches)) == 40

    _run(peers[0].url, act, max_batch=1)


def test_a_refusal_is_not_taken_to_another_server(peers: list[Peer]) -> None:
    for peer in peers:
        peer.answer = Response('{"detail": "no"}', 401)
    with pytest.raises(RetrieverRejected, match=f"{peers[0].port}/retrieve refused .* 401: no"):
        _run([peer.url for peer in peers], lambda client: client.search("q"))
    assert [len(peer.requests) for peer in peers] == [1, 0]
    peers[0].answer = Response("<html>")
    with pytest.raises(RetrieverReplyError, match=str(peers[0].port)):
        _run([peer.url for peer in peers], lambda client: client.search("q"))


def test_check_needs_one_server_that_answers(peers: list[Peer]) -> None:
    peers[0].stop()
    _run([peer.url for peer in peers], lambda client: client.check())
    assert len(peers[1].requests) == 1


def test_the_token_and_the_deadline_are_sent(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(client: RetrievalClient) -> None:
        await client.search("q")

    def sent() -> tuple[str | None, int]:
        headers = peers[0].requests[-1].headers
        return headers.get("Authorization"), int(headers["X-Deadline-Ms"])

    monkeypatch.delenv("RETRIEVAL_AUTH_TOKEN", raising=False)
    _run(peers[0].url, act, timeout_s=30.0)
    assert sent() == (None, 30_000)
    monkeypatch.setenv("RETRIEVAL_AUTH_TOKEN", "of the environment\n")
    _run(peers[0].url, act, timeout_s=30.0, deadline_s=20.0)
    token, deadline_ms = sent()
    assert token == "Bearer of the environment" and 0 < deadline_ms <= 20_000
    _run(peers[0].url, act, token="given")
    assert sent()[0] == "Bearer given"


def test_a_client_without_an_address_is_refused() -> None:
    for url in ("", " , ", [], [""]):
        with pytest.raises(ValueError, match="at least one server"):
            RetrievalClient(url)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> tuple[ReplicaPool, Clock]:
    """A router of one server, a clock, and no jitter."""
    monkeypatch.setattr(routing.random, "uniform", lambda low, high: 1.0)
    clock = Clock()
    return ReplicaPool(["http://a"], clock), clock


def _fail(router: ReplicaPool) -> None:
    server = router.choose()
    assert server is not None
    is_probe = server.begin()
    server.record_failure(is_probe)
    server.end(is_probe)


def test_the_breaker_opens_after_three_failures_and_its_pause_doubles(one: tuple[ReplicaPool, Clock]) -> None:
    router, clock = one
    for _ in range(3):
        assert router.wait_s() == 0
        _fail(router)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        assert router.choose() is None and router.wait_s() == pause_s
        clock.now += pause_s
        _fail(router)  # the probe


def test_a_success_between_failures_keeps_the_breaker_closed(one: tuple[ReplicaPool, Clock]) -> None:
    router, _ = one
    for _ in range(3):
        _fail(router)
        _fail(router)
        router.replicas[0].record_success()
        assert router.choose() is router.replicas[0]


def test_one_probe_at_a_time_and_its_outcome_decides(one: tuple[ReplicaPool, Clock]) -> None:
    router, clock = one
    [server] = router.replicas
    early = [server.begin() for _ in range(5)]
    assert early == [False] * 5
    for is_probe in early[:4]:  # four failures of requests that left together: one pause, of the first length
        server.record_failure(is_probe)
        server.end(is_probe)
    assert router.wait_s() == 0.5
    clock.now += 0.5
    assert router.choose() is server and server.begin()
    assert router.choose() is None and router.wait_s() == 0.1
    server.record_failure(early[4])  # a late one says nothing about the probe
    server.end(early[4])
    assert router.choose() is None
    server.end(True)  # cancelled: the next request is the probe
    assert router.choose() is server and server.begin()
    server.record_success()
    server.end(True)
    assert router.choose() is server and not server.begin() and server.running == 1
    _fail(router)
    _fail(router)
    assert router.wait_s() == 0


def test_a_server_that_rests_is_alive(one: tuple[ReplicaPool, Clock]) -> None:
    router, clock = one
    _fail(router)
    _fail(router)
    router.replicas[0].pause(7.0)
    assert router.choose() is None and router.wait_s() == router.rest_s() == 7.0
    clock.now += 7.0
    _fail(router)
    _fail(router)
    assert router.wait_s() == 0 and router.rest_s() == 0
