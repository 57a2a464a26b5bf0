"""The order in which batches take queries, worked out by hand, and what must hold for any history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.search.server.fair_queue import FairQueue, Request, Ticket


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def _put(queue: FairQueue, loop: asyncio.AbstractEventLoop, name: str, size: int, k: int = 3) -> Request:
    request = Request(k, loop.create_future())
    for number in range(size):
        queue.put(request, Ticket(f"{name}{number}", k))
    return request


def _take(queue: FairQueue, limit: int) -> list[str]:
    return [ticket.query for ticket in queue.take(limit)]


def test_requests_take_turns_across_batches(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue()
    for name in ("a", "b", "c"):
        _put(queue, loop, name, 3)
    batches = [_take(queue, 2) for _ in range(5)]
    # after "a0 b0" the turn is at c, then again at a, b, c
    assert batches == [["a0", "b0"], ["c0", "a1"], ["b1", "c1"], ["a2", "b2"], ["c2"]]
    assert len(queue) == 0 and _take(queue, 2) == []


def test_places_left_go_to_the_oldest_request(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue()
    for name in ("a", "b"):
        _put(queue, loop, name, 4)
    assert _take(queue, 5) == ["a0", "b0", "a1", "a2", "a3"]
    assert _take(queue, 5) == ["b1", "b2", "b3"]


def test_a_rare_k_gets_its_turn(loop: asyncio.AbstractEventLoop) -> None:
    queue = FairQueue()
    _put(queue, loop, "a", 4, k=3)
    _put(queue, loop, "rare", 1, k=7)
    _put(queue, loop, "b", 4, k=3)
    assert [_take(queue, 2) for _ in range(3)] == [["a0", "b0"], ["rare0"], ["a1", "b1"]]


_STEPS = st.lists(
    st.tuples(st.just("put"), st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    | st.tuples(st.just("drop"), st.integers(0, 20))
    | st.tuples(st.just("take"), st.integers(1, 4)),
    max_size=30,
)


@settings(max_examples=8 * settings.default.max_examples)
@given(steps=_STEPS)
def test_every_query_that_somebody_waits_for_is_taken_once(steps: list[tuple[str, Any]]) -> None:
    """Against the definition: a set of waiters for each query that is queued."""
    loop = asyncio.new_event_loop()
    queue, requests = FairQueue(), list[Request]()
    tickets: dict[int, Ticket] = {}
    waiters: dict[int, set[int]] = {}

    def put(numbers: list[int]) -> None:
        request = Request(3, loop.create_future())
        requests.append(request)
        for number in numbers:
            queue.put(request, tickets.setdefault(number, Ticket(str(number), 3)))
            waiters.setdefault(number, set()).add(len(requests) - 1)

    def drop(which: int) -> None:
        if which >= len(requests):
            return
        expected = {number for number, who in waiters.items() if who == {which}}
        assert {int(ticket.query) for ticket in queue.drop(requests[which])} == expected
        for number in list(waiters):
            waiters[number].discard(which)
        forget(expected)

    def take(limit: int) -> None:
        taken = [int(ticket.query) for ticket in queue.take(limit)]
        assert len(taken) == len(set(taken)) == min(limit, len(waiters))
        assert set(taken) <= set(waiters)
        forget(set(taken))

    def forget(numbers: set[int]) -> None:
        for number in numbers:
            del waiters[number], tickets[number]

    actions: dict[str, Callable[[Any], None]] = {"put": put, "drop": drop, "take": take}
    for action, value in steps:
        actions[action](value)
        assert len(queue) == len(waiters)
    take(1000)
    assert not waiters
    loop.close()
