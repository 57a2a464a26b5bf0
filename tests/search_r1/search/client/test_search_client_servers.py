"""The client in front of several real servers: some die, hang, answer 503, come back; a password in an address."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from e2e_world import free_port
from fastapi import Response
from search_clients import Peer, search, until, with_client
from search_servers import wait_until

from search_r1.errors import RetrieverError, RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.search.client import RetrievalClient
from search_r1.search.client import replicas as routing
from search_r1.search.client.replicas import ReplicaPool
from search_r1.search.mcp_server.tool import HttpSource


class Server(Peer):
    """It can be stopped, and started on its port. `answer`, if there is one, is all it says."""

    answer: Response | None = None

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self.signature = f" by {self.port}"
        self.start()

    def step(self, queries: list[str]) -> Response | float:
        return self.answer or 0.0

    def start(self) -> None:
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="error", lifespan="off"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def stop(self) -> None:
        self.server.force_exit = self.server.should_exit = True
        self.thread.join(timeout=30)


@pytest.fixture
def peers() -> Iterator[list[Server]]:
    made = [Server(), Server()]
    yield made
    for peer in made:
        peer.stop()


def _urls(peers: list[Server]) -> list[str]:
    return [peer.url for peer in peers]


async def _one_by_one(client: RetrievalClient, number: int) -> list[str]:
    return [(await client.search(f"q{n}"))[0]["contents"].rpartition(" ")[2] for n in range(number)]


def _ask(peers: list[Server], number: int, **options: Any) -> list[str]:
    """The ports that answered so many queries, one after the other."""
    return with_client(_urls(peers), lambda client: _one_by_one(client, number), **options)


def _ports(peers: list[Server]) -> list[str]:
    return [str(peer.port) for peer in peers]


def test_healthy_servers_take_turns(peers: list[Server]) -> None:
    urls = _urls(peers)
    for url in (urls, ",".join(urls), f" {urls[0]} , {urls[1]},"):
        answered = with_client(url, lambda client: _one_by_one(client, 6))
        assert Counter(answered) == dict.fromkeys(_ports(peers), 3)


def test_a_busy_server_gets_less(peers: list[Server]) -> None:
    peers[0].door.clear()

    async def act(client: RetrievalClient) -> None:
        slow = asyncio.ensure_future(client.search("first"))
        await until(lambda: peers[0].times)
        await _one_by_one(client, 5)
        peers[0].door.set()
        await slow

    with_client(_urls(peers), act)
    assert [len(peer.times) for peer in peers] == [1, 5]


def test_a_dead_server_costs_no_search_and_is_left_alone(
    peers: list[Server], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)
    peers[0].stop()
    answered = _ask(peers, 12)
    assert answered == [str(peers[1].port)] * 12
    assert caplog.text.count(f"{peers[0].url} failed 3 times in a row") == 1


@pytest.mark.parametrize("status", [503, 502, None], ids=["503", "502", "hangs"])
def test_a_broken_server_is_asked_three_times_and_no_more(
    peers: list[Server], monkeypatch: pytest.MonkeyPatch, status: int | None
) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)
    if status:
        peers[0].answer = Response("broken", status)
    else:
        peers[0].door.clear()
    timeout_s = 10.0 if status else 1.0
    answered = _ask(peers, 12, timeout_s=timeout_s)
    assert answered == [str(peers[1].port)] * 12
    assert len(peers[0].times) == 3


def test_a_server_that_comes_back_is_found_by_one_probe(peers: list[Server], caplog: pytest.LogCaptureFixture) -> None:
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

    with_client(_urls(peers), act)
    assert f"{peers[0].url} answers again" in caplog.text


def test_retry_after_sends_the_search_elsewhere_and_is_no_failure(peers: list[Server]) -> None:
    peers[0].answer = Response('{"detail": "full"}', 503, headers={"Retry-After": "1000"})
    answered = _ask(peers, 6)
    assert answered == [str(peers[1].port)] * 6
    assert len(peers[0].times) == 1


def test_all_servers_down_until_the_deadline_then_one_returns(
    peers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    for peer in peers:
        peer.stop()
    urls = _urls(peers)
    with monkeypatch.context() as patch, pytest.raises(RetrieverUnavailable) as caught:
        patch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)  # no last attempt that the deadline cuts short
        search(urls, deadline_s=0.8)
    assert all(url in str(caught.value) for url in urls) and "ClientConnectorError" in str(caught.value)

    async def act(client: RetrievalClient) -> list[str]:
        waiting = asyncio.ensure_future(_one_by_one(client, 2))
        await asyncio.sleep(0.6)
        await asyncio.to_thread(peers[1].start)
        return await waiting

    assert with_client(urls, act) == [str(peers[1].port)] * 2


def test_many_searches_wait_for_one_probe_of_a_broken_server(peers: list[Server]) -> None:
    peers[0].answer = Response("broken", 502)

    async def act(client: RetrievalClient) -> None:
        searches = [asyncio.ensure_future(client.search(f"q{n}")) for n in range(40)]
        await asyncio.sleep(1.0)
        # 40 requests leave at once; after them only probes, at least 0.25 s and then twice as long apart
        assert len(peers[0].times) < 60
        peers[0].answer = None
        assert len(await asyncio.gather(*searches)) == 40

    with_client(peers[0].url, act, max_batch=1)


def test_a_refusal_is_not_taken_to_another_server(peers: list[Server]) -> None:
    for peer in peers:
        peer.answer = Response('{"detail": "no"}', 401)
    with pytest.raises(RetrieverRejected, match=f"{peers[0].port}/retrieve refused .* 401: no"):
        search(_urls(peers))
    assert [len(peer.times) for peer in peers] == [1, 0]
    peers[0].answer = Response("<html>")
    with pytest.raises(RetrieverReplyError, match=str(peers[0].port)):
        search(_urls(peers))


def test_check_needs_one_server_that_answers(peers: list[Server]) -> None:
    peers[0].stop()
    with_client(_urls(peers), lambda client: client.check())
    assert len(peers[1].times) == 1


def test_the_token_and_the_deadline_are_sent(peers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    def sent() -> tuple[str | None, int]:
        headers = peers[0].headers[-1]
        return headers.get("Authorization"), int(headers["X-Deadline-Ms"])

    monkeypatch.delenv("RETRIEVAL_AUTH_TOKEN", raising=False)
    search(peers[0].url, timeout_s=30.0)
    assert sent() == (None, 30_000)
    monkeypatch.setenv("RETRIEVAL_AUTH_TOKEN", "of the environment\n")
    search(peers[0].url, timeout_s=30.0, deadline_s=20.0)
    token, deadline_ms = sent()
    assert token == "Bearer of the environment" and 0 < deadline_ms <= 20_000
    search(peers[0].url, token="given")
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


# --- user and password in an address are used, and never shown


SECRET = "hunter2"


def _address(url: str) -> str:
    return url.replace("http://", f"http://user:{SECRET}@") + "/retrieve"


def test_the_server_is_asked_in_the_name_of_its_address(run_app) -> None:
    peer = Peer()
    assert search(_address(run_app(peer.app)))[0]["contents"] == "about q"
    in_base64 = base64.b64encode(f"user:{SECRET}".encode()).decode()
    assert [headers["Authorization"] for headers in peer.headers] == [f"Basic {in_base64}"]


@pytest.mark.parametrize("answer", [Response("no", 403), Response("down", 502), Response("<html>")])
def test_no_error_or_log_line_shows_user_and_password(
    run_app, answer: Response, caplog: pytest.LogCaptureFixture
) -> None:
    url = run_app(Peer(answer, forever=True).app)
    with caplog.at_level(logging.DEBUG), pytest.raises(RetrieverError) as caught:
        search(_address(url), deadline_s=1.5)
    host = url.removeprefix("http://")
    assert f"http://***@{host}/retrieve" in str(caught.value)
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("search_r1")]
    assert SECRET not in str(caught.value) and not any(SECRET in line for line in ours)
    assert bool(ours) == (answer.status_code == 502)  # the pause that the circuit breaker gives


@pytest.mark.parametrize("scheme", ["http", "ftp"])
def test_an_address_without_a_server_shows_them_neither(scheme: str) -> None:
    with pytest.raises((RetrieverError, ValueError)) as caught:  # the latter for what is no address of a server
        search(f"{scheme}://user:{SECRET}@127.0.0.1:1/retrieve", deadline_s=0.3)
    assert SECRET not in str(caught.value) and f"{scheme}://***@127.0.0.1:1" in str(caught.value)


def test_an_address_without_a_scheme_shows_them_neither() -> None:
    with pytest.raises(ValueError, match="'127.0.0.1:1/retrieve' is not an address") as caught:
        HttpSource(f"user:{SECRET}@127.0.0.1:1/retrieve", 1.0)
    assert SECRET not in str(caught.value)


def test_both_a_token_and_a_password_are_refused(run_app) -> None:
    url = run_app(Peer(Response("{}")).app)
    with pytest.raises(RetrieverError, match="Cannot combine") as caught:
        search(_address(url), token="t0ken-t0ken", deadline_s=1.0)
    assert SECRET not in str(caught.value) and "t0ken" not in str(caught.value)


def test_the_name_of_a_source_is_for_all_to_read() -> None:
    assert HttpSource(f"http://user:{SECRET}@a:1/r, http://b:2/r", 1.0).name == "http://***@a:1/r, http://b:2/r"
