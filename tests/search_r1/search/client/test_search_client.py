"""The client against real HTTP peers: coalescing, retries, deadlines, refusals, malformed answers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
from e2e_world import free_port
from fastapi import FastAPI, Request, Response

from search_r1.errors import RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.http.error_replies import retry_after_s
from search_r1.search.client import RetrievalClient
from search_r1.search.client import replicas as routing


class Peer:
    """A small retrieval server that first plays a script of troubles. `requests` keeps what it was sent.

    While `door` is not set nothing is answered.
    """

    def __init__(self, *script: Response | float, forever: bool = False) -> None:
        self.script, self.forever = list(script), forever
        self.door = threading.Event()
        self.door.set()
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.app = FastAPI()
        self.app.post("/retrieve")(self._retrieve)

    async def _retrieve(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append(body)
        self.times.append(time.monotonic())
        while not self.door.is_set():
            await asyncio.sleep(0.005)
        step = (self.script[0] if self.forever else self.script.pop(0)) if self.script else 0.0
        if isinstance(step, Response):
            return step
        await asyncio.sleep(step)
        if any(query == "bad" for query in body["queries"]):
            return Response('{"detail": "queries.0: bad"}', 422)
        result = [[{"document": {"contents": f"about {query}"}, "score": 1.5}] for query in body["queries"]]
        return Response(json.dumps({"result": result}), media_type="application/json")

    @property
    def asked(self) -> list[str]:
        return [query for body in self.requests for query in body["queries"]]


def _error(status: int, **headers: str) -> Response:
    return Response(json.dumps({"detail": f"trouble {status}"}), status, headers=headers)


def _with_client(url: str, act: Callable[[RetrievalClient], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        client = RetrievalClient(f"{url}/retrieve", **options)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


def test_passages_from_the_real_server(small_server: str) -> None:
    async def act(client: RetrievalClient) -> Any:
        await client.check()
        return await asyncio.gather(
            client.search("capital Tarsia"), client.search("zyxxy"), client.search("\ud800 東京")
        )

    first, none, unicode = _with_client(small_server, act, topk=1)
    assert first[0]["id"] == "p50" and first[0]["score"] > 0 and first[0]["contents"].startswith('"Tarsia"')
    assert none == []
    assert unicode[0]["id"] == "p30"


def test_concurrent_searches_travel_together_and_duplicates_once(run_app) -> None:
    peer = Peer()

    async def act(client: RetrievalClient) -> Any:
        return await asyncio.gather(*(client.search(f"q{number % 20}") for number in range(100)))

    answers = _with_client(run_app(peer.app), act, max_batch=8)
    assert [hits[0]["contents"] for hits in answers] == [f"about q{number % 20}" for number in range(100)]
    assert sorted(peer.asked) == sorted(f"q{number}" for number in range(20))
    assert sorted(len(body["queries"]) for body in peer.requests) == [4, 8, 8]
    assert all(body["topk"] == 3 and body["return_scores"] is True for body in peer.requests)


def test_a_query_in_flight_is_not_asked_again_but_a_later_one_is(run_app) -> None:
    peer = Peer()
    peer.door.clear()

    async def act(client: RetrievalClient) -> None:
        first = asyncio.ensure_future(client.search("same"))
        await _until(lambda: peer.asked == ["same"])
        second = asyncio.ensure_future(client.search("same"))
        await asyncio.sleep(0)  # it has begun
        peer.door.set()
        one, two = await asyncio.gather(first, second)
        assert one == two and one[0] is not two[0]  # a caller may change its own copy
        assert peer.asked == ["same"]
        await client.search("same")
        assert peer.asked == ["same", "same"]

    _with_client(run_app(peer.app), act)


def test_connections_of_a_busy_moment_are_not_kept(run_app) -> None:
    peer = Peer()
    peer.door.clear()
    url = run_app(peer.app)
    port = int(url.rpartition(":")[2])

    def open_to_server() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(c.status == "ESTABLISHED" and bool(c.raddr) and c.raddr.port == port for c in connections)

    async def act(client: RetrievalClient) -> None:
        searches = asyncio.gather(*(client.search(f"q{number}") for number in range(8)))
        await _until(lambda: len(peer.requests) == 8)
        assert open_to_server() == 8
        peer.door.set()
        await searches
        start = time.monotonic()
        await _until(lambda: open_to_server() == 0)
        assert time.monotonic() - start < 10  # aiohttp would keep them for 15, and the server for 60

    _with_client(url, act, max_batch=1)


def test_a_cancelled_waiter_does_not_break_the_others(run_app) -> None:
    peer = Peer()
    peer.door.clear()

    async def act(client: RetrievalClient) -> Any:
        tasks = [asyncio.ensure_future(client.search(query)) for query in ("same", "same", "other")]
        await _until(lambda: peer.asked == ["same", "other"])
        tasks[0].cancel()
        peer.door.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, same, other = _with_client(run_app(peer.app), act)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert same[0]["contents"] == "about same" and other[0]["contents"] == "about other"


def test_missing_id_and_score_become_none(run_app) -> None:
    documents = [{"document": {"contents": "a"}}, {"document": '"T"\nb', "score": 2.0}, {"contents": "c", "id": "7"}]
    peer = Peer(Response(json.dumps({"result": [documents]})))
    passages = _with_client(run_app(peer.app), lambda client: client.search("q"))
    assert passages == [
        {"contents": "a", "id": None, "score": None},
        {"contents": '"T"\nb', "id": None, "score": 2.0},
        {"contents": "c", "id": "7", "score": None},
    ]


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_server_errors_are_retried_with_growing_pauses(run_app, status: int) -> None:
    peer = Peer(_error(status), _error(status), _error(status))
    passages = _with_client(run_app(peer.app), lambda client: client.search("q"))
    assert passages[0]["contents"] == "about q" and len(peer.requests) == 4
    pauses = [later - earlier for earlier, later in zip(peer.times, peer.times[1:], strict=False)]
    assert all(pause >= 0.05 * 2**number for number, pause in enumerate(pauses))


def test_a_slow_attempt_is_tried_again(run_app) -> None:
    peer = Peer(40.0)
    start = time.monotonic()
    passages = _with_client(run_app(peer.app), lambda client: client.search("q"), timeout_s=1.5)
    assert passages[0]["contents"] == "about q" and len(peer.requests) >= 2  # more where the second one is slow too
    assert time.monotonic() - start < 30


def test_retry_after_is_honoured(run_app) -> None:
    peer = Peer(_error(503, **{"Retry-After": "1"}))
    _with_client(run_app(peer.app), lambda client: client.search("q"))
    assert peer.times[1] - peer.times[0] >= 1.0


def test_retry_after_beyond_the_deadline_ends_at_once(run_app) -> None:
    peer = Peer(_error(503, **{"Retry-After": "30"}))
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match="trouble 503"):
        _with_client(run_app(peer.app), lambda client: client.search("q"), deadline_s=20.0)
    assert time.monotonic() - start < 10 and len(peer.requests) == 1


def test_retry_after_dates() -> None:
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9
    assert retry_after_s("soon") == retry_after_s(None) == retry_after_s("-3") == 0.0


def test_the_deadline_ends_retries_and_names_url_and_cause(run_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)  # no last attempt that the deadline cuts short
    url = run_app(Peer(_error(500), forever=True).app)
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable) as caught:
        _with_client(url, lambda client: client.search("q"), deadline_s=2.0)
    assert 0.3 < time.monotonic() - start < 10
    message = str(caught.value)
    assert f"{url}/retrieve" in message and "HTTP 500: trouble 500" in message and "attempts" in message


def test_a_hanging_server_ends_at_the_deadline(run_app) -> None:
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match="no answer to one request"):
        _with_client(
            run_app(Peer(20.0, forever=True).app), lambda client: client.search("q"), timeout_s=0.4, deadline_s=1.0
        )
    assert time.monotonic() - start < 10


def test_each_waiter_of_a_query_has_its_own_deadline(run_app) -> None:
    peer = Peer(_error(500), forever=True)

    async def act(client: RetrievalClient) -> list[tuple[float, float]]:
        async def begin_and_end() -> tuple[float, float]:
            begin = time.monotonic()
            with pytest.raises(RetrieverUnavailable):
                await client.search("same")
            return begin, time.monotonic()

        first = asyncio.ensure_future(begin_and_end())
        await asyncio.sleep(1.5)
        return await asyncio.gather(first, begin_and_end())

    early, late = _with_client(run_app(peer.app), act, deadline_s=2.0)
    assert late[1] - late[0] > 1.0  # not cut to the 0.5 s that the first waiter had left
    assert early[1] < late[1] - 0.1  # and the first did not wait for the second


def test_a_server_that_is_still_loading_is_waited_for(run_app) -> None:
    peer = Peer()
    start = time.monotonic()
    url = run_app(peer.app, delay_s=0.7)
    passages = _with_client(url, lambda client: client.search("q"))
    assert passages[0]["contents"] == "about q" and time.monotonic() - start >= 0.7
    assert len(peer.requests) == 1


@pytest.mark.parametrize("status", [400, 404, 422, 429])
def test_client_errors_are_not_retried(run_app, status: int) -> None:
    peer = Peer(_error(status), forever=True)
    with pytest.raises(RetrieverRejected, match=f"HTTP {status}: trouble {status}") as caught:
        _with_client(run_app(peer.app), lambda client: client.search("q"))
    assert caught.value.status == status and len(peer.requests) == 1


def test_a_bad_query_fails_alone(run_app) -> None:
    peer = Peer()

    async def act(client: RetrievalClient) -> Any:
        searches = (client.search(query) for query in ("a", "bad", "b"))
        return await asyncio.gather(*searches, return_exceptions=True)

    first, bad, last = _with_client(run_app(peer.app), act)
    assert first[0]["contents"] == "about a" and last[0]["contents"] == "about b"
    assert isinstance(bad, RetrieverRejected)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>login</html>",
        b'{"result": []}',
        b'{"result": null}',
        b"[]",
        b'{"result": [null]}',
        b'{"result": [{"contents": "x"}]}',
        b'{"result": [[{"document": {"id": "1"}}]]}',
        b'{"result": [[null]]}',
        b'{"result": [[]], "cut',
    ],
)
def test_a_malformed_answer_is_an_error_not_an_empty_result(run_app, body: bytes) -> None:
    peer = Peer(Response(body))
    with pytest.raises(RetrieverReplyError, match="not with a retrieval reply"):
        _with_client(run_app(peer.app), lambda client: client.search("q"))
    assert len(peer.requests) == 1


def test_a_change_of_the_index_is_told_once(run_app, caplog: pytest.LogCaptureFixture) -> None:
    reply = json.dumps({"result": [[{"contents": "x"}]]})
    peer = Peer(*[Response(reply, headers={"X-Index-Version": version}) for version in ("one", "one", "two", "one")])

    async def act(client: RetrievalClient) -> None:
        for number in range(4):
            await client.search(f"q{number}")
        assert client.index_versions == ("one", "two")

    _with_client(run_app(peer.app), act)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("search_r1")]
    assert "has the index version two; earlier answers came from one" in warning


def test_check_names_the_url_and_the_command(run_app) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable) as caught:
        _with_client(url, lambda client: client.check())
    assert time.monotonic() - start < 20
    assert f"{url}/retrieve" in str(caught.value) and "bash retrieval_launch.sh" in str(caught.value)
    with pytest.raises(RetrieverUnavailable, match="HTTP 404.*answers there, but not at this path"):
        _with_client(run_app(FastAPI()), lambda client: client.check())
    with pytest.raises(ValueError, match="is not an address: write http://host:port/retrieve"):
        _with_client("no-url", lambda client: client.check())


def test_close_ends_waiting_searches_and_the_client_works_again(run_app) -> None:
    peer = Peer()
    peer.door.clear()
    client = RetrievalClient(f"{run_app(peer.app)}/retrieve")

    async def leave() -> None:
        waiting = asyncio.ensure_future(client.search("q"))
        await _until(lambda: peer.asked == ["q"])
        await client.close()
        peer.door.set()
        with pytest.raises(RetrieverUnavailable, match="was closed"):
            await waiting

    async def again() -> None:
        assert (await client.search("q"))[0]["contents"] == "about q"
        await client.close()

    asyncio.run(leave())
    asyncio.run(again())


def test_two_loops_at_once_are_refused() -> None:
    client = RetrievalClient(f"http://127.0.0.1:{free_port()}/retrieve")

    async def outer() -> None:
        with pytest.raises(RetrieverUnavailable):
            await asyncio.wait_for(client.check(), 60)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, client.check())
        await client.close()

    asyncio.run(outer())
