"""Which queries share a batch, in which order, and which never run: through a retriever that waits, and by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from search_scheduling import GatedRetriever, Stage, scores, staged
from search_servers import wait_until

from search_r1.errors import ServiceUnavailable
from search_r1.search.corpus import Corpus
from search_r1.search.server.batching import FairQueue, Request, Ticket
from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions

Ask = Callable[..., "Future[requests.Response]"]


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture
def stage(run_app, corpus_file: Path, clients: ThreadPoolExecutor) -> Iterator[Stage]:
    """Batches of at most 4, a queue of 6, no cache. It ends before `clients`, so that nobody waits for ever."""
    with staged(run_app, corpus_file, max_batch=4, max_queue=6, cache_mib=0) as stage:
        yield stage


def _occupy(stage: Stage, clients: ThreadPoolExecutor) -> Future[requests.Response]:
    """The first batch, "busy 0", runs until the test lets it pass."""
    busy = clients.submit(stage.ask, "busy 0")
    stage.wait_for_batches(1)
    return busy


def test_the_next_batch_forms_while_the_current_one_runs(stage: Stage, clients: ThreadPoolExecutor) -> None:
    busy = _occupy(stage, clients)
    replies = []
    for number in (1, 2, 3):
        replies.append(clients.submit(stage.ask, f"q {number}"))
        stage.wait_for_queue(number)
    stage.retriever.let_pass(2)
    assert [scores(reply.result()) for reply in [busy, *replies]] == [[0.0], [1.0], [2.0], [3.0]]
    assert stage.retriever.batches == [["busy 0"], ["q 1", "q 2", "q 3"]]
    assert stage.value("retrieval_batch_queries_count") == 2 and stage.value("retrieval_batch_queries_sum") == 4


def test_a_long_list_does_not_hold_up_single_queries(stage: Stage, clients: ThreadPoolExecutor) -> None:
    _occupy(stage, clients)
    long = clients.submit(stage.ask, *(f"long {number}" for number in range(4)))
    stage.wait_for_queue(4)
    singles = [clients.submit(stage.ask, "one 1")]
    stage.wait_for_queue(5)
    singles += [clients.submit(stage.ask, "two 2")]
    stage.wait_for_queue(6)
    stage.retriever.let_pass(2)
    assert [scores(reply.result()) for reply in singles] == [[1.0], [2.0]]
    stage.wait_for_batches(3)
    assert stage.retriever.batches[1:] == [["long 0", "one 1", "two 2", "long 1"], ["long 2", "long 3"]]
    stage.retriever.let_pass()
    assert scores(long.result()) == [0.0, 1.0, 2.0, 3.0]


def test_equal_queries_in_flight_are_run_once(stage: Stage, clients: ThreadPoolExecutor) -> None:
    busy = [_occupy(stage, clients)]
    for number, text in enumerate(["busy 0", " busy\t0 ", "busy   0"], start=1):  # one that runs
        busy.append(clients.submit(stage.ask, text))
        wait_until(lambda number=number: stage.value("retrieval_shared_queries_total") == number)
    one = clients.submit(stage.ask, "q 1", "q 1", "q 2")  # duplicates in a list
    stage.wait_for_queue(2)
    two = clients.submit(stage.ask, "q 2", "q 3")  # one that is queued
    stage.wait_for_queue(3)
    stage.retriever.let_pass(2)
    assert [scores(reply.result()) for reply in busy] == [[0.0]] * 4
    assert scores(one.result()) == [1.0, 1.0, 2.0] and scores(two.result()) == [2.0, 3.0]
    assert stage.retriever.batches == [["busy 0"], ["q 1", "q 2", "q 3"]]


def test_a_query_that_a_list_asked_for_too_is_taken_at_the_earlier_turn(
    stage: Stage, clients: ThreadPoolExecutor
) -> None:
    _occupy(stage, clients)
    long = clients.submit(stage.ask, *(f"long {number}" for number in range(6)))
    stage.wait_for_queue(6)
    single = clients.submit(stage.ask, "long 5")
    wait_until(lambda: stage.value("retrieval_shared_queries_total") == 1)
    stage.retriever.let_pass(2)
    assert scores(single.result()) == [5.0]
    assert stage.retriever.batches[1] == ["long 0", "long 5", "long 1", "long 2"]
    stage.retriever.let_pass()
    assert scores(long.result()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_batch_has_one_k(stage: Stage, clients: ThreadPoolExecutor) -> None:
    _occupy(stage, clients)
    for number, topk in enumerate([2, 3, 2], start=1):
        clients.submit(stage.ask, f"q {number}", topk=topk)
        stage.wait_for_queue(number)
    stage.retriever.let_pass(3)
    stage.wait_for_batches(3)
    assert stage.retriever.batches[1:] == [["q 1", "q 3"], ["q 2"]]
    assert stage.retriever.ks == [1, 2, 3]


def test_k_larger_than_the_corpus_asks_for_the_corpus(stage: Stage) -> None:
    stage.retriever.open()
    assert scores(stage.ask("q 1", topk=100)) == [1.0]
    assert stage.retriever.ks == [5]


def test_beyond_the_queue_is_503_at_once_and_the_admitted_are_answered(
    stage: Stage, clients: ThreadPoolExecutor
) -> None:
    busy = _occupy(stage, clients)
    admitted = clients.submit(stage.ask, *(f"q {number}" for number in range(1, 6)))
    stage.wait_for_queue(5)
    refused = stage.ask("q 6", "q 7")  # the gate is closed: this answer does not wait for it
    assert refused.status_code == 503 and 1 <= int(refused.headers["Retry-After"]) <= 30
    assert refused.json()["detail"].startswith("5 queries are queued and the limit is 6")
    assert stage.value("retrieval_rejected_total") == 1
    last = clients.submit(stage.ask, "q 6", "q 5")  # one new query fits, the other is queued already
    stage.wait_for_queue(6)
    stage.retriever.open()
    assert scores(busy.result()) == [0.0] and scores(admitted.result()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert scores(last.result()) == [6.0, 5.0]
    assert "q 7" not in sum(stage.retriever.batches, [])


def test_a_request_larger_than_the_queue_is_admitted_when_nothing_waits(stage: Stage) -> None:
    stage.retriever.open()
    assert scores(stage.ask(*(f"q {number}" for number in range(20)))) == [float(number) for number in range(20)]
    assert max(map(len, stage.retriever.batches)) == 4


def test_an_expired_request_is_not_run(stage: Stage, clients: ThreadPoolExecutor) -> None:
    busy = _occupy(stage, clients)
    late = stage.ask("late 1", headers={"X-Deadline-Ms": "20"})
    assert late.status_code == 504 and late.json() == {"detail": "not answered within the deadline of 0.02 s"}
    past = stage.ask("late 2", headers={"X-Deadline-Ms": "-5"})
    assert past.status_code == 504
    stage.wait_for_queue(0)
    stage.retriever.open()
    assert scores(busy.result()) == [0.0] and scores(stage.ask("q 2")) == [2.0]
    assert stage.retriever.batches == [["busy 0"], ["q 2"]]
    assert stage.value("retrieval_expired_total") == 2


def test_the_server_has_a_deadline_of_its_own(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file, timeout_s=0.05) as stage:
        assert stage.ask("q 1", headers={"X-Deadline-Ms": "60000"}).status_code == 504
        assert stage.ask("q 1").json() == {"detail": "not answered within the deadline of 0.05 s"}


@pytest.mark.parametrize("value", ["soon", "nan", ""])
def test_a_deadline_that_is_no_number_is_refused(stage: Stage, value: str) -> None:
    reply = stage.ask("q 1", headers={"X-Deadline-Ms": value})
    assert reply.status_code == 422 and "X-Deadline-Ms" in reply.json()["detail"]


def test_a_client_that_left_costs_nothing(stage: Stage, clients: ThreadPoolExecutor) -> None:
    busy = _occupy(stage, clients)
    with stage.client_that_leaves("gone 1", "gone 2"):
        stage.wait_for_queue(2)
    stage.wait_for_queue(0)
    stage.retriever.open()
    assert scores(busy.result()) == [0.0] and scores(stage.ask("q 3")) == [3.0]
    assert stage.retriever.batches == [["busy 0"], ["q 3"]]


@pytest.mark.parametrize("first", [True, False])
def test_a_query_that_another_waits_for_outlives_the_client_that_left(
    stage: Stage, clients: ThreadPoolExecutor, first: bool
) -> None:
    _occupy(stage, clients)
    if not first:
        other = clients.submit(stage.ask, "both 1")
        stage.wait_for_queue(1)
    with stage.client_that_leaves("both 1", "gone 2"):
        stage.wait_for_queue(2)
        if first:
            other = clients.submit(stage.ask, "both 1")
        wait_until(lambda: stage.value("retrieval_shared_queries_total") == 1)
    stage.wait_for_queue(1)
    stage.retriever.let_pass(2)
    assert scores(other.result()) == [1.0]
    assert stage.retriever.batches == [["busy 0"], ["both 1"]]


def test_a_bad_query_fails_alone(stage: Stage, clients: ThreadPoolExecutor) -> None:
    _occupy(stage, clients)
    replies = []
    for number, query in enumerate(["q 1", "poison", "nan", "q 4"], start=1):
        replies.append(clients.submit(stage.ask, query))
        stage.wait_for_queue(number)
    stage.retriever.open()
    good, poison, nan, also_good = (reply.result() for reply in replies)
    assert stage.retriever.batches[1] == ["q 1", "poison", "nan", "q 4"]
    assert scores(good) == [1.0] and scores(also_good) == [4.0]
    assert poison.status_code == 500 and poison.json()["detail"].endswith("RuntimeError: a poisoned query")
    assert nan.status_code == 500 and nan.json()["detail"] == "the gated retriever scored row 0 with nan"
    assert stage.value("retrieval_errors_total") == 2
    assert scores(stage.ask("q 5")) == [5.0]


def test_an_error_is_not_kept(run_app, corpus_file: Path) -> None:
    with staged(run_app, corpus_file, cache_mib=1) as stage:
        stage.retriever.open()
        assert [stage.ask("poison").status_code for _ in range(2)] == [500, 500]
        assert stage.retriever.batches == [["poison"]] * 2


def test_closing_lets_the_batch_end_and_fails_whoever_waits(corpus_file: Path) -> None:
    async def close_while_busy() -> None:
        corpus = Corpus(corpus_file)
        retriever = GatedRetriever(len(corpus))
        service = RetrievalService(retriever, corpus, ServiceOptions(max_batch=1, max_wait_ms=0))
        asked = [asyncio.create_task(service.search([query], 1)) for query in ("busy 0", "q 1")]
        while len(retriever.batches) < 1:
            await asyncio.sleep(0.005)
        opening = threading.Thread(target=open_once_it_closes, args=(service, retriever))
        opening.start()
        service.close()
        assert (await asked[0])[0][0] == (corpus[0], 0.0)
        for late in (asked[1], service.search(["q 2"], 1)):
            with pytest.raises(ServiceUnavailable, match="stopping"):
                await late
        assert retriever.batches == [["busy 0"]]

    def open_once_it_closes(service: RetrievalService, retriever: GatedRetriever) -> None:
        wait_until(lambda: service._batcher._closing)
        retriever.open()

    asyncio.run(close_while_busy())


# --- the queue alone


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
