"""One owner thread runs the queries of all requests in batches; the next batch forms while the current one runs."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

from search_r1.errors import SearchError, SearchFailed, ServiceUnavailable
from search_r1.http.metrics import StageMetrics
from search_r1.search.server.fair_queue import FairQueue, Query, Request, Result, Ticket

_LONGEST_RETRY_S = 30
_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class BatchLimits:
    """Sizes are in queries. `max_wait_ms`: how long the first query of an idle server waits for others."""

    max_batch: int = 256
    max_wait_ms: float = 1.0
    max_queue: int = 8192


class Batcher(Generic[Query, Result]):
    """Answers each distinct query once. Call `ask` and `close` from one event loop; `run` runs in the owner thread."""

    def __init__(
        self,
        run: Callable[[list[Query], int], Sequence[Result | SearchError]],
        keep: Callable[[Query, int, Result], None],
        limits: BatchLimits,
        metrics: StageMetrics,
    ) -> None:
        """`run(queries, k)` returns a result or an error for each; `keep(query, k, result)` gets every result."""
        self._run = run
        self._keep = keep
        self._limits = limits
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[
            tuple[Query, int], Ticket[Query, Result]
        ] = {}  # queued or running; only the event loop touches it
        self._queue: FairQueue[Query, Result] = FairQueue()
        self._closing = False
        self._changed = threading.Condition()  # guards the queue and its tickets
        self._batch_s = 0.0
        metrics.queue.set_function(lambda: len(self._queue))
        self._owner = threading.Thread(target=self._own, name=metrics.stage, daemon=True)
        self._owner.start()

    async def ask(self, queries: list[Query], k: int) -> list[Result | SearchError]:
        """The result or the error of each of the distinct `queries`. Raises `ServiceUnavailable` if the queue is full.

        A cancelled call leaves the queue; a query that others also wait for stays.
        """
        self._loop = asyncio.get_running_loop()
        request: Request[Query, Result] = Request(k, self._loop.create_future())
        with self._changed:
            self._admit(request, queries)
        try:
            await request.done
        finally:
            with self._changed:
                for ticket in self._queue.drop(request):
                    del self._open[ticket.query, ticket.k]
        return [cast(Result | SearchError, ticket.outcome) for ticket in request.tickets]

    def close(self) -> None:
        """Let the running batch finish; waiting requests fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._owner.join()
        self._post(self._fail_open)  # after the last batch, whose answers may be on their way

    def _admit(self, request: Request[Query, Result], queries: list[Query]) -> None:
        # Only queries that nobody has asked yet take a place in the queue.
        fresh = [query for query in queries if (query, request.k) not in self._open]
        self._check_room(len(fresh))
        # Join the tickets of the others. One that is already in a batch needs no turn any more.
        was_empty = not self._queue
        for query in queries:
            ticket = self._open.setdefault((query, request.k), Ticket(query, request.k))
            request.tickets.append(ticket)
            if ticket.queued:
                self._queue.put(request, ticket)
            else:
                ticket.requests[request] = None
        # Wake the owner thread if it waits for a first query, or for a full batch.
        request.missing = len(queries)
        self._metrics.shared.inc(len(queries) - len(fresh))
        if was_empty or len(self._queue) >= self._limits.max_batch:
            self._changed.notify()

    def _check_room(self, num_fresh: int) -> None:
        """A request larger than the whole queue is admitted when nothing is queued, otherwise it never would be."""
        if self._closing:
            raise _stopping()
        queued = len(self._queue)
        if not queued or queued + num_fresh <= self._limits.max_queue:
            return
        batches_ahead = queued / self._limits.max_batch
        retry_after_s = min(_LONGEST_RETRY_S, max(1, math.ceil(batches_ahead * self._batch_s)))
        raise ServiceUnavailable(
            f"{queued} {self._metrics.unit} are queued and the limit is {self._limits.max_queue}; "
            f"try again in {retry_after_s} s",
            retry_after_s,
        )

    def _own(self) -> None:
        while batch := self._next_batch():
            start = time.perf_counter()
            outcomes = self._run([ticket.query for ticket in batch], batch[0].k)
            self._batch_s = time.perf_counter() - start
            self._post(self._settle, batch, outcomes, self._batch_s)

    def _next_batch(self) -> list[Ticket[Query, Result]]:
        """Wait for queries. Empty when closing."""
        limits = self._limits
        with self._changed:
            while not self._closing:
                if not self._queue:
                    self._changed.wait_for(lambda: self._queue or self._closing)
                    full = lambda: len(self._queue) >= limits.max_batch or self._closing  # noqa: E731
                    self._changed.wait_for(full, timeout=limits.max_wait_ms / 1000)
                if self._queue and not self._closing:
                    return self._queue.take(limits.max_batch)
        return []

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed; no request waits any more
                self._loop.call_soon_threadsafe(callback, *arguments)

    def _fail_open(self) -> None:
        for ticket in self._open.values():
            for request in ticket.requests:
                request.fail(_stopping())

    def _settle(
        self, batch: list[Ticket[Query, Result]], outcomes: Sequence[Result | SearchError], seconds: float
    ) -> None:
        self._metrics.batch_done(len(batch), seconds)
        for ticket, outcome in zip(batch, outcomes, strict=True):
            self._open.pop((ticket.query, ticket.k), None)
            ticket.outcome = outcome
            if not isinstance(outcome, SearchError):
                self._keep(ticket.query, ticket.k, outcome)
            for request in ticket.requests:
                request.advance()


def _stopping() -> ServiceUnavailable:
    return ServiceUnavailable("the server is stopping", retry_after_s=1)


# Work for `run` in which one bad item of a batch does not fail the others.


def attempt(work: Callable[[], T], who: str) -> T | SearchError:
    """The result or the error of `work`; exceptions are caught, so that they do not end the thread."""
    try:
        return work()
    except SearchError as error:
        return error
    except Exception as error:
        _LOG.exception("%s failed", who)
        return SearchFailed(f"{who} failed: {type(error).__name__}: {error}")


def attempt_each(work: Callable[[list[Item]], Sequence[T]], items: list[Item], who: str) -> list[T | SearchError]:
    """The result or the error of each item. A failing batch is halved until the failing items are isolated."""
    found = attempt(partial(_complete, work, items, who), who)
    if isinstance(found, list):
        return found
    if len(items) == 1:
        return [found]
    half = len(items) // 2
    return attempt_each(work, items[:half], who) + attempt_each(work, items[half:], who)


def _complete(work: Callable[[list[Item]], Sequence[T]], items: list[Item], who: str) -> list[T | SearchError]:
    found = work(items)
    if len(found) != len(items):
        raise SearchFailed(f"{who} returned {len(found)} results for {len(items)} items")
    return list(found)
