"""The queries that wait for a batch, and the rule by which requests share a batch.

A batch first takes one query of every request in turn, so that a list of thousands cannot starve a single query. The
remaining places go to the requests that have waited longest, so that lists finish one after another instead of all at
the end. A batch has one k: results for a smaller k need not be a prefix of those for a larger one.

A query is any hashable value: a text to search, or a text and a document to score.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from search_r1.errors import SearchError

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
