"""The asynchronous client of the retrieval server.

Searches made at about the same time share one request, a query in flight is sent once however many callers wait for it,
and temporary failures are retried, on another server if there are several. The result is passages or a typed error,
never an error disguised as a result.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import aiohttp

from search_r1.errors import (
    RetrieverAddressError,
    RetrieverError,
    RetrieverQueryFailed,
    RetrieverRejected,
    RetrieverReplyError,
    RetrieverUnavailable,
)
from search_r1.http.client import addresses_of, backoff_s, check_addresses, entered_loop
from search_r1.search.client.exchange import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Passages,
    PendingQuery,
    QueryFailure,
    ServerReply,
    TemporaryFailure,
    may_be_one_query,
    post,
)
from search_r1.search.client.replicas import Replica, ReplicaPool
from search_r1.search.sanitize import whole_characters
from url_text import without_credentials

_LOG = logging.getLogger(__name__)
_GATHER_S = 0.001  # how long the first query of a batch waits for others
_IDLE_S = 0.5  # connections take turns: kept for longer, there would always be as many as ever were busy at once
_LAST_PAUSE_S = 0.05
_CHECK_DEADLINE_S = 5.0
_SLACK_S = 0.25  # lets a batch report its own cause before the waiter's clock rings
_TOKEN_VARIABLE = "RETRIEVAL_AUTH_TOKEN"  # the one that the server reads


def token_headers(token: str | None) -> dict[str, str]:
    """The header that carries the bearer token, by default that of the environment variable RETRIEVAL_AUTH_TOKEN."""
    token = (token or os.environ.get(_TOKEN_VARIABLE, "")).strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


class RetrievalClient:
    """Searches over HTTP, from one event loop at a time; `close` it before another loop uses it."""

    def __init__(
        self,
        url: str | Sequence[str],
        topk: int = 3,
        timeout_s: float = 10.0,
        deadline_s: float = 60.0,
        max_batch: int = 64,
        token: str | None = None,
    ) -> None:
        """`timeout_s` bounds one HTTP attempt, `deadline_s` all attempts of a search, `max_batch` queries per request.

        `url` is one address, a list, or several separated by commas; the servers must hold the same index. `token` is
        sent as a bearer token, else the environment variable RETRIEVAL_AUTH_TOKEN. `http://user:password@host/` uses
        basic authentication instead; messages and logs omit it. Raises `RetrieverAddressError` for an invalid address.
        """
        # The servers, and what every request to them carries.
        self.urls = tuple(addresses_of(url))
        if not self.urls:
            raise RetrieverAddressError("a RetrievalClient needs the address of at least one server")
        check_addresses(self.urls)
        self.name = ", ".join(map(without_credentials, self.urls))
        self.topk = topk
        self._headers = token_headers(token)
        # The limits of a search.
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._max_batch = self._list_size = max_batch
        self.index_versions: tuple[str, ...] = ()  # of the servers that answered, in the order in which they appeared
        # silence for a shorter time, at the end of a deadline, is not held against a server
        self._fair_s = min(timeout_s, deadline_s) / 2
        self._forget()

    async def search(self, query: str) -> Passages:
        """The passages for `query`, best first: dicts with `id`, `contents`, `score` and the row's other keys.

        `id` and `score` are None when the server does not send them. Raises `RetrieverUnavailable` (no answer within
        the deadline), `RetrieverQueryFailed` (the server fails on this query), `RetrieverRejected` (HTTP 4xx) or
        `RetrieverReplyError` (not a retrieval reply).
        """
        self._attach()
        pending = self._pending_query(whole_characters(query))
        pending.deadline = max(pending.deadline, time.monotonic() + self._deadline_s)
        try:
            # shielded: a caller that gives up does not cancel the query of the others
            passages = await asyncio.wait_for(asyncio.shield(pending.answer), self._deadline_s + _SLACK_S)
        except TimeoutError as error:
            raise self._unavailable(f"no answer in {self._deadline_s:.1f} s; last: {self._last_failure}") from error
        return [dict(passage) for passage in passages]

    async def check(self) -> None:
        """Run one real query within 5 seconds.

        Raises `RetrieverUnavailable`, which names the URL and what to do, for any failure.
        """
        self._attach()
        # Asked apart from the batches of searches, with a short deadline of its own.
        pending = PendingQuery("health check", asyncio.get_running_loop(), self._num_answered)
        pending.deadline = time.monotonic() + min(_CHECK_DEADLINE_S, self._deadline_s)
        try:
            outcomes = await self._ask([pending])
        except (RetrieverRejected, RetrieverReplyError, RetrieverQueryFailed) as error:
            # The server is there: what is wrong is the path in the address, which another start of it would not mend.
            if isinstance(error, RetrieverRejected) and error.status == 404:
                what = "a server answers there, but not at this path; the address must end in /retrieve"
                raise RetrieverUnavailable(f"{error}: {what}") from error
            raise self._unavailable(str(error)) from error
        for outcome in outcomes:
            if isinstance(outcome, QueryFailure):
                raise self._unavailable(f"HTTP {outcome.status}: {outcome.detail}")

    async def close(self) -> None:
        """Close the connections; pending searches raise `RetrieverUnavailable`. The client may be used again."""
        session, batches, pending_queries = self._session, list(self._batches), list(self._open.values())
        if self._timer is not None:
            self._timer.cancel()
        # A search that begins from here on opens a session of its own, so that it is not ended with the others.
        self._forget()
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)
        # Cancelled batches answer nothing, and their callers would wait until the deadline.
        for pending in pending_queries:
            if not pending.answer.done():
                pending.answer.set_exception(self._unavailable("the client was closed"))
        if session is not None:
            await session.close()

    def _forget(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[str, PendingQuery] = {}
        self._waiting: list[PendingQuery] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_failure = "none"
        self._num_answered = 0
        self._replicas = ReplicaPool(self.urls)

    def _attach(self) -> None:
        """Take the running event loop as the one this client belongs to."""
        loop = entered_loop(self._loop, "RetrievalClient")
        if loop is None:
            return
        self._forget()
        self._loop = loop
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S))

    def _pending_query(self, query: str) -> PendingQuery:
        """The open question with this query, or a new one that leaves with the next batch."""
        if query in self._open:
            return self._open[query]
        assert self._loop is not None
        pending = self._open[query] = PendingQuery(query, self._loop, self._num_answered)
        self._waiting.append(pending)
        if len(self._waiting) >= self._list_size:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_later(_GATHER_S, self._send)
        return pending

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.ensure_future(self._answer(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _answer(self, batch: list[PendingQuery]) -> None:
        """Resolve every query of the batch as soon as its own outcome is known.

        What may be the fault of one query of several is found by halving: a bad query fails nobody else.
        """
        try:
            while batch:
                batch = await self._settle(batch, await self._ask(batch))
        except Exception as error:  # the callers get it, whatever it is
            if len(batch) > 1 and may_be_one_query(error):
                half = len(batch) // 2
                await asyncio.gather(self._answer(batch[:half]), self._answer(batch[half:]))
                return
            for pending in batch:
                self._end(pending, error)

    async def _settle(self, batch: list[PendingQuery], outcomes: list[Passages | QueryFailure]) -> list[PendingQuery]:
        """The queries to send again, after the pause that they need; the others have a result or an error."""
        pauses: dict[PendingQuery, float] = {}
        for pending, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, list):
                self._num_answered += 1
                self._end(pending, outcome)
                continue
            self._last_failure = f"HTTP {outcome.status}: {outcome.detail}"
            try:
                pauses[pending] = pending.pause_after(outcome, self._num_answered, self.name)
            except RetrieverError as error:
                self._end(pending, error)
        # The failed ones stay together: one request, after the longest of their pauses.
        if pauses:
            await asyncio.sleep(max(pauses.values()))
        return list(pauses)

    def _end(self, pending: PendingQuery, outcome: Passages | Exception) -> None:
        self._open.pop(pending.query, None)
        pending.end(outcome)

    async def _ask(self, batch: list[PendingQuery]) -> list[Passages | QueryFailure]:
        """Attempt until it works or the deadline (which may move while we wait) would pass.

        A server that failed is not asked again before the others were, and then after a pause. Raises
        `RetrieverQueryFailed` when one query may be to blame.
        """
        start, attempts, rounds = time.monotonic(), 0, 0
        failures: dict[Replica, TemporaryFailure] = {}
        while True:
            # Ask one server after the other, each once.
            left_s = max(pending.left_s() for pending in batch)
            server = self._replicas.choose(avoid=failures) if not attempts or left_s > 0 else None
            if server is not None:
                attempts += 1
                try:
                    return await self._attempt(server, batch, left_s)
                except TemporaryFailure as failure:
                    self._last_failure = str(failure)
                    failures[server] = failure
                    continue

            # All have failed. A server that answered HTTP 500 may have failed on one of the queries only.
            if any(failure.failed for failure in failures.values()):
                if len(batch) > 1:
                    raise RetrieverQueryFailed(self._last_failure)  # the list is halved, to find the query at fault
                batch[0].failed_alone(self._num_answered, self._last_failure)
            # Ask all of them again after a pause, if time is left for it.
            rest_s = self._replicas.rest_s()
            if left_s <= max(rest_s, _LAST_PAUSE_S):
                elapsed = f"{attempts} attempts in {time.monotonic() - start:.1f} s"
                raise self._unavailable(f"{elapsed}; last: {self._last_failure}")
            rounds += 1
            pause_s = self._replicas.wait_s() or backoff_s(rounds, FIRST_PAUSE_S, LONGEST_PAUSE_S)
            await asyncio.sleep(max(rest_s, min(pause_s, left_s / 2)))
            failures.clear()

    async def _attempt(
        self, server: Replica, batch: list[PendingQuery], left_s: float
    ) -> list[Passages | QueryFailure]:
        """One request to one server, and what it says about the server's health."""
        # A failure counts against the server only if it was the server's: see each case.
        timeout_s = min(self._timeout_s, max(left_s, 0.001))
        is_probe = server.begin()
        try:
            assert self._session is not None
            queries = [pending.query for pending in batch]
            reply = await post(self._session, server, queries, self.topk, timeout_s, self._headers)
        except TemporaryFailure as failure:
            if failure.pause_s:
                server.pause(failure.pause_s)
            elif failure.failed:
                server.record_success()  # it answers; resting it for one bad query would make all others wait
            elif timeout_s >= self._fair_s or not isinstance(failure.__cause__, TimeoutError):
                server.record_failure(is_probe)
            raise
        except RetrieverError:
            server.record_success()  # a refusal or a bad reply does not either
            raise
        finally:
            server.end(is_probe)

        # It answered: its circuit closes, and its headers are read.
        server.record_success()
        self._learn(server, reply)
        return reply.outcomes

    def _learn(self, server: Replica, reply: ServerReply) -> None:
        """Note what the server says of itself: which index it has, and how long lists should be."""
        self._list_size = min(self._max_batch, reply.batch_size or self._max_batch)
        version = reply.index_version
        if version is None or version in self.index_versions:
            return
        if self.index_versions:
            _LOG.warning(
                "retrieval server %s has the index version %s; earlier answers came from %s: the index was changed, or "
                "the servers hold different ones",
                *(server.name, version, ", ".join(self.index_versions)),
            )
        self.index_versions = (*self.index_versions, version)

    def _unavailable(self, reason: str) -> RetrieverUnavailable:
        return RetrieverUnavailable(
            f"retriever {self.name} is not available ({reason}); start one with: bash retrieval_launch.sh"
        )
