"""The client against real HTTP peers: coalescing, retries, deadlines, refusals, malformed answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from e2e_world import free_port
from fastapi import FastAPI, Response
from search_clients import Peer, search, until, with_client

from search_r1.errors import RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.http.client import retry_after_s
from search_r1.search.client import RetrievalClient, retrieval_client
from search_r1.search.client import replicas as routing


def _error(status: int, **headers: str) -> Response:
    return Response(json.dumps({"detail": f"trouble {status}"}), status, headers=headers)


@pytest.fixture
def address_of(run_app) -> Callable[..., str]:
    return lambda peer, **more: f"{run_app(peer.app, **more)}/retrieve"


def test_passages_from_the_real_server(small_server: str) -> None:
    async def act(client: RetrievalClient) -> Any:
        await client.check()
        return await asyncio.gather(
            client.search("capital Tarsia"), client.search("zyxxy"), client.search("\ud800 東京")
        )

    first, none, unicode = with_client(f"{small_server}/retrieve", act, topk=1)
    assert first[0]["id"] == "p50" and first[0]["score"] > 0 and first[0]["contents"].startswith('"Tarsia"')
    assert none == []
    assert unicode[0]["id"] == "p30"


def test_concurrent_searches_travel_together_and_duplicates_once(address_of) -> None:
    peer = Peer()

    async def act(client: RetrievalClient) -> Any:
        return await asyncio.gather(*(client.search(f"q{number % 20}") for number in range(100)))

    answers = with_client(address_of(peer), act, max_batch=8)
    assert [hits[0]["contents"] for hits in answers] == [f"about q{number % 20}" for number in range(100)]
    assert sorted(peer.asked) == sorted(f"q{number}" for number in range(20))
    assert sorted(len(body["queries"]) for body in peer.requests) == [4, 8, 8]
    assert all(body["topk"] == 3 and body["return_scores"] is True for body in peer.requests)


def test_a_query_in_flight_is_not_asked_again_but_a_later_one_is(address_of) -> None:
    peer = Peer()
    peer.door.clear()

    async def act(client: RetrievalClient) -> None:
        first = asyncio.ensure_future(client.search("same"))
        await until(lambda: peer.asked == ["same"])
        second = asyncio.ensure_future(client.search("same"))
        await asyncio.sleep(0)  # it has begun
        peer.door.set()
        one, two = await asyncio.gather(first, second)
        assert one == two and one[0] is not two[0]  # a caller may change its own copy
        assert peer.asked == ["same"]
        await client.search("same")
        assert peer.asked == ["same", "same"]

    with_client(address_of(peer), act)


def test_connections_of_a_busy_moment_are_not_kept(address_of) -> None:
    peer = Peer()
    peer.door.clear()
    url = address_of(peer)
    port = urlsplit(url).port

    def open_to_server() -> int:
        connections = psutil.Process().net_connections("tcp")
        return sum(c.status == "ESTABLISHED" and bool(c.raddr) and c.raddr.port == port for c in connections)

    async def act(client: RetrievalClient) -> None:
        searches = asyncio.gather(*(client.search(f"q{number}") for number in range(8)))
        await until(lambda: len(peer.requests) == 8)
        assert open_to_server() == 8
        peer.door.set()
        await searches
        async with asyncio.timeout(10):  # aiohttp would keep them for 15, and the server for 60
            while open_to_server():
                await asyncio.sleep(0.1)

    with_client(url, act, max_batch=1)


def test_a_cancelled_waiter_does_not_break_the_others(address_of) -> None:
    peer = Peer()
    peer.door.clear()

    async def act(client: RetrievalClient) -> Any:
        tasks = [asyncio.ensure_future(client.search(query)) for query in ("same", "same", "other")]
        await until(lambda: peer.asked == ["same", "other"])
        tasks[0].cancel()
        peer.door.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, same, other = with_client(address_of(peer), act)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert same[0]["contents"] == "about same" and other[0]["contents"] == "about other"


def test_missing_id_and_score_become_none(address_of) -> None:
    documents = [{"document": {"contents": "a"}}, {"document": '"T"\nb', "score": 2.0}, {"contents": "c", "id": "7"}]
    peer = Peer(Response(json.dumps({"result": [documents]})))
    passages = search(address_of(peer))
    assert passages == [
        {"contents": "a", "id": None, "score": None},
        {"contents": '"T"\nb', "id": None, "score": 2.0},
        {"contents": "c", "id": "7", "score": None},
    ]


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 507, 520, 522, 524, 529])
def test_server_errors_are_retried_with_growing_pauses(address_of, status: int) -> None:
    peer = Peer(_error(status), _error(status), _error(status))
    passages = search(address_of(peer))
    assert passages[0]["contents"] == "about q" and len(peer.requests) == 4
    pauses = [later - earlier for earlier, later in zip(peer.times, peer.times[1:], strict=False)]
    assert all(pause >= 0.05 * 2**number for number, pause in enumerate(pauses))


def test_an_error_whose_message_cannot_be_read_is_retried(address_of) -> None:
    peer = Peer(Response("[" * 100_000, 503))
    assert search(address_of(peer))[0]["contents"] == "about q" and len(peer.requests) == 2


def test_a_slow_attempt_is_tried_again(address_of) -> None:
    peer = Peer(40.0)
    start = time.monotonic()
    passages = search(address_of(peer), timeout_s=0.5)
    assert passages[0]["contents"] == "about q" and len(peer.requests) >= 2  # more where the second one is slow too
    assert time.monotonic() - start < 30


def test_retry_after_is_honoured(address_of) -> None:
    peer = Peer(_error(503, **{"Retry-After": "1"}))
    search(address_of(peer))
    assert peer.times[1] - peer.times[0] >= 1.0


def test_retry_after_beyond_the_deadline_ends_at_once(address_of) -> None:
    peer = Peer(_error(503, **{"Retry-After": "30"}))
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match="trouble 503"):
        search(address_of(peer), deadline_s=20.0)
    assert time.monotonic() - start < 10 and len(peer.requests) == 1


def test_retry_after_dates() -> None:
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9
    assert retry_after_s("soon") == retry_after_s(None) == retry_after_s("-3") == 0.0


def test_the_deadline_ends_retries_and_names_url_and_cause(address_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_FIRST_PAUSE_S", 1000.0)  # no last attempt that the deadline cuts short
    url = address_of(Peer(_error(500), forever=True))
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable) as caught:
        search(url, deadline_s=1.0)
    assert 0.3 < time.monotonic() - start < 10
    message = str(caught.value)
    assert url in message and "HTTP 500: trouble 500" in message and "attempts" in message


def test_a_hanging_server_ends_at_the_deadline(address_of) -> None:
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable, match="no answer to one request"):
        search(address_of(Peer(20.0, forever=True)), timeout_s=0.2, deadline_s=0.5)
    assert time.monotonic() - start < 10


def test_each_waiter_of_a_query_has_its_own_deadline(address_of) -> None:
    peer = Peer(_error(500), forever=True)

    async def act(client: RetrievalClient) -> list[tuple[float, float]]:
        async def begin_and_end() -> tuple[float, float]:
            begin = time.monotonic()
            with pytest.raises(RetrieverUnavailable):
                await client.search("same")
            return begin, time.monotonic()

        first = asyncio.ensure_future(begin_and_end())
        await asyncio.sleep(0.7)
        return await asyncio.gather(first, begin_and_end())

    early, late = with_client(address_of(peer), act, deadline_s=1.0)
    assert late[1] - late[0] > 0.6  # not cut to the 0.3 s that the first waiter had left
    assert early[1] < late[1] - 0.1  # and the first did not wait for the second


def test_a_server_that_is_still_loading_is_waited_for(address_of) -> None:
    peer = Peer()
    start = time.monotonic()
    passages = search(address_of(peer, delay_s=0.4))
    assert passages[0]["contents"] == "about q" and time.monotonic() - start >= 0.4
    assert len(peer.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422, 501])
def test_client_errors_are_not_retried(address_of, status: int) -> None:
    peer = Peer(_error(status), forever=True)
    with pytest.raises(RetrieverRejected, match=f"HTTP {status}: trouble {status}") as caught:
        search(address_of(peer))
    assert caught.value.status == status and len(peer.requests) == 1


def test_a_bad_query_fails_alone(address_of, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer()
    refusal = Response('{"detail": "queries.0: bad"}', 422)
    monkeypatch.setattr(peer, "step", lambda queries: refusal if "bad" in queries else 0.0)

    async def act(client: RetrievalClient) -> Any:
        searches = (client.search(query) for query in ("a", "bad", "b"))
        return await asyncio.gather(*searches, return_exceptions=True)

    first, bad, last = with_client(address_of(peer), act)
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
        b"[" * 100_000,
        b'{"result": [[]], "errors": {"0": {"status": 1e999, "detail": "x"}}}',
    ],
)
def test_a_malformed_answer_is_an_error_not_an_empty_result(address_of, body: bytes) -> None:
    peer = Peer(Response(body))
    with pytest.raises(RetrieverReplyError, match="not with a retrieval reply"):
        search(address_of(peer))
    assert len(peer.requests) == 1


def test_a_change_of_the_index_is_told_once(address_of, caplog: pytest.LogCaptureFixture) -> None:
    reply = json.dumps({"result": [[{"contents": "x"}]]})
    peer = Peer(*[Response(reply, headers={"X-Index-Version": version}) for version in ("one", "one", "two", "one")])

    async def act(client: RetrievalClient) -> None:
        for number in range(4):
            await client.search(f"q{number}")
        assert client.index_versions == ("one", "two")

    with_client(address_of(peer), act)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("search_r1")]
    assert "has the index version two; earlier answers came from one" in warning


def test_check_names_the_url_and_the_command(run_app, monkeypatch: pytest.MonkeyPatch) -> None:
    assert retrieval_client._CHECK_DEADLINE_S == 5.0
    monkeypatch.setattr(retrieval_client, "_CHECK_DEADLINE_S", 0.3)
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    start = time.monotonic()
    with pytest.raises(RetrieverUnavailable) as caught:
        with_client(url, lambda client: client.check())
    assert time.monotonic() - start < 20  # of the 60 that a search has
    assert url in str(caught.value) and "bash retrieval_launch.sh" in str(caught.value)
    with pytest.raises(RetrieverUnavailable, match="HTTP 404.*answers there, but not at this path"):
        with_client(f"{run_app(FastAPI())}/retrieve", lambda client: client.check())
    with pytest.raises(ValueError, match="is not an address: write http://host:port/retrieve"):
        with_client("no-url", lambda client: client.check())


def test_close_ends_waiting_searches_and_the_client_works_again(address_of) -> None:
    peer = Peer()
    peer.door.clear()
    client = RetrievalClient(address_of(peer))

    async def leave() -> None:
        waiting = asyncio.ensure_future(client.search("q"))
        await until(lambda: peer.asked == ["q"])
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
    client = RetrievalClient(f"http://127.0.0.1:{free_port()}/retrieve", deadline_s=0.1)

    async def outer() -> None:
        with pytest.raises(RetrieverUnavailable):
            await asyncio.wait_for(client.check(), 60)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, client.check())
        await client.close()

    asyncio.run(outer())
