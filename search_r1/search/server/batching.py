"""One owner thread runs the queries of all requests in batches; the next batch forms while the current one runs.

A batch first takes one query of every request in turn, so that a list of thousands cannot starve a single query. The
remaining places go to the requests that have waited longest, so that lists finish one after another instead of all at
the end. A batch has one k: results for a smaller k need not be a prefix of those for a larger one.

A query is any hashable value: a text to search, or a text and a document to score.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar, cast

from search_r1.errors import SearchError, SearchFailed, ServiceUnavailable
from search_r1.http.gate import StageMetrics

_LOG = logging.getLogger(__name__)

Query = TypeVar("Query", bound=Hashable)
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class Request(Generic[Query, Result]):
    """One caller. `waiting` are its tickets in the queue; `missing` counts those that are not settled."""

    k: int
    done: asyncio.Future[None]
    tickets: list[Ticket[Query, Result]] = field(default_factory=list)
    waiting: dict[Ticket[Query, Result], None] = field(default_factory=dict)
    missing: int = 0

    def advance(self) -> None:
        """One more of its tickets is settled."""
        self.missing -= 1
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(eq=False, slots=True)
class Ticket(Generic[Query, Result]):
    """A query to answer once, however many `requests` wait for it. `outcome` is None until it is settled."""

    query: Query
    k: int
    requests: dict[Request[Query, Result], None] = field(default_factory=dict)
    queued: bool = True
    outcome: Result | SearchError | None = None


class FairQueue(Generic[Query, Result]):
    """Tickets in the order in which batches take them. Its length is the number of tickets. It is not locked."""

    def __init__(self) -> None:
        self._size = 0
        self._arrivals: dict[Request[Query, Result], None] = {}
        self._turns: OrderedDict[Request[Query, Result], None] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def put(self, request: Request[Query, Result], ticket: Ticket[Query, Result]) -> None:
        """Let `request` wait for `ticket`, new or already queued; then it is taken at the earlier of its turns."""
        self._size += not ticket.requests
        ticket.requests[request] = None
        request.waiting[ticket] = None
        self._arrivals.setdefault(request)
        self._turns.setdefault(request)

    def drop(self, request: Request[Query, Result]) -> list[Ticket[Query, Result]]:
        """Remove `request`. Returns the tickets that no request waits for any more; they leave the queue as well."""
        orphans = []
        for ticket in request.waiting:
            del ticket.requests[request]
            if not ticket.requests:
                orphans.append(ticket)
        request.waiting.clear()
        self._size -= len(orphans)
        self._leave(request)
        return orphans

    def take(self, limit: int) -> list[Ticket[Query, Result]]:
        """The next batch: at most `limit` tickets of the k whose turn it is."""
        if not self._turns:
            return []
        # One query of every request in turn.
        k = next(iter(self._turns)).k
        batch: list[Ticket[Query, Result]] = []
        for request in [request for request in self._turns if request.k == k]:
            if len(batch) < limit and request.waiting:
                batch.append(self._take_from(request))
                if request.waiting:
                    self._turns.move_to_end(request)
        # The remaining places go to those that have waited longest.
        for request in [request for request in self._arrivals if request.k == k]:
            while len(batch) < limit and request.waiting:
                batch.append(self._take_from(request))
        return batch

    def _take_from(self, request: Request[Query, Result]) -> Ticket[Query, Result]:
        ticket = next(iter(request.waiting))
        ticket.queued = False
        self._size -= 1
        for waiter in ticket.requests:
            del waiter.waiting[ticket]
            if not waiter.waiting:
                self._leave(waiter)
        return ticket

    def _leave(self, request: Request[Query, Result]) -> None:
        self._arrivals.pop(request, None)
        self._turns.pop(request, None)


_LONGEST_RETRY_S = 30
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
        # Last, because the thread uses all of the above at once.
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
        # The client should come back when the batches ahead of it are done, if each takes as long as the last one did.
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
