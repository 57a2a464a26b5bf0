"""The asynchronous client of the retrieval server.

Searches made at about the same time travel in one request, a query in flight is asked once however many wait for it,
and passing trouble is retried, on another server when there are several. What comes back is passages or a typed error,
never an error in the shape of a result.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from search_r1.search.address import without_credentials
from search_r1.search.backoff import backoff_s
from search_r1.search.errors import RetrieverError, RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.search.reply import parse_reply, retry_after_s, server_message
from search_r1.search.routing import Router, Server

Passages = list[dict[str, Any]]

_GATHER_S = 0.001  # how long the first query of a batch waits for others
_IDLE_S = 0.5  # connections take turns: kept for longer, there would always be as many as ever were busy at once
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LAST_PAUSE_S = 0.1, 5.0, 0.05
_CHECK_DEADLINE_S = 5.0
_SLACK_S = 0.25  # lets a batch report its own cause before the waiter's clock rings
_RETRIED = frozenset({500, 502, 503, 504})
_TOKEN_VARIABLE = "RETRIEVAL_AUTH_TOKEN"  # the one that the server reads
_BLAMES_A_QUERY = frozenset({400, 413, 422, 424})  # 424: an online engine would not answer one of them


class _Trouble(Exception):
    """An attempt failed in a way that may pass; `pause_s` is what Retry-After asked for."""

    def __init__(self, server: Server, cause: str, pause_s: float = 0.0) -> None:
        super().__init__(f"{server.name}: {without_credentials(cause)}")
        self.pause_s = pause_s


class _Question:
    """A query and those who wait for it: `deadline` (monotonic seconds) is the latest of theirs."""

    def __init__(self, query: str, loop: asyncio.AbstractEventLoop) -> None:
        self.query = query
        self.deadline = 0.0
        self.answer: asyncio.Future[Passages] = loop.create_future()
        # an error nobody waits for any more is not worth a warning at exit
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())


class RetrievalClient:
    """Search by HTTP, from one event loop at a time; `close` it before another loop uses it."""

    def __init__(
        self,
        url: str | Sequence[str],
        topk: int = 3,
        timeout_s: float = 10.0,
        deadline_s: float = 60.0,
        max_batch: int = 64,
        token: str | None = None,
    ) -> None:
        """`timeout_s` bounds one HTTP attempt, `deadline_s` all attempts of a search, `max_batch` queries a request.

        `url` is one address, a list, or several with commas between; the servers must hold the same index. `token` is
        sent as a bearer token, else the environment variable RETRIEVAL_AUTH_TOKEN. `http://user:password@host/` asks by
        that name instead; messages and logs leave it out. Raises `ValueError` without an address.
        """
        addresses = url.split(",") if isinstance(url, str) else url
        self.urls = tuple(address.strip() for address in addresses if address.strip())
        if not self.urls:
            raise ValueError("a RetrievalClient needs the address of at least one server")
        self.name = ", ".join(map(without_credentials, self.urls))
        self.topk = topk
        token = (token or os.environ.get(_TOKEN_VARIABLE, "")).strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._deadline_s = deadline_s
        self._max_batch = max_batch
        # silence for a shorter time, at the end of a deadline, is not held against a server
        self._fair_s = min(timeout_s, deadline_s) / 2
        self._forget()

    async def search(self, query: str) -> Passages:
        """The passages for `query`, best first: dicts with `id`, `contents`, `score` and the row's further keys.

        `id` and `score` are None when the server does not send them. Raises `RetrieverUnavailable` (no answer within
        the deadline), `RetrieverRejected` (HTTP 4xx) or `RetrieverReplyError` (an answer that is none).
        """
        self._attach()
        question = self._question(query.encode("utf-8", "replace").decode())
        question.deadline = max(question.deadline, time.monotonic() + self._deadline_s)
        try:
            # shielded: one who gives up leaves the question to the others
            passages = await asyncio.wait_for(asyncio.shield(question.answer), self._deadline_s + _SLACK_S)
        except TimeoutError as error:
            raise self._unavailable(f"no answer in {self._deadline_s:.1f} s; last: {self._last_trouble}") from error
        return [dict(passage) for passage in passages]

    async def check(self) -> None:
        """Ask one real query within 5 seconds.

        Raises `RetrieverUnavailable`, which names the URL and the command that starts a server, for any failure.
        """
        self._attach()
        deadline = time.monotonic() + min(_CHECK_DEADLINE_S, self._deadline_s)
        try:
            await self._ask(["health check"], lambda: deadline)
        except (RetrieverRejected, RetrieverReplyError) as error:
            raise self._unavailable(str(error)) from error

    async def close(self) -> None:
        """Close the connections; searches that wait raise `RetrieverUnavailable`. The client may be used again."""
        session, batches, questions = self._session, list(self._batches), list(self._open.values())
        if self._timer is not None:
            self._timer.cancel()
        self._forget()
        for batch in batches:
            batch.cancel()
        await asyncio.gather(*batches, return_exceptions=True)
        for question in questions:
            if not question.answer.done():
                question.answer.set_exception(self._unavailable("the client was closed"))
        if session is not None:
            await session.close()

    def _forget(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[str, _Question] = {}
        self._waiting: list[_Question] = []
        self._batches: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._last_trouble = "none"
        self._router = Router(self.urls)

    def _attach(self) -> None:
        """Belong to the running loop. A loop that was closed took its connections with it."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this RetrievalClient belongs to another event loop; close() it there first")
        self._forget()
        self._loop = loop
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S))

    def _question(self, query: str) -> _Question:
        """The open question with this query, or a new one that leaves with the next batch."""
        if query in self._open:
            return self._open[query]
        assert self._loop is not None
        question = self._open[query] = _Question(query, self._loop)
        self._waiting.append(question)
        if len(self._waiting) >= self._max_batch:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_later(_GATHER_S, self._send)
        return question

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        if batch:
            task = asyncio.ensure_future(self._answer(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _answer(self, batch: list[_Question]) -> None:
        """Settle every question of the batch. After a refusal or an answer that is none they are asked one by one.

        So a bad query, and one spoilt answer, fails nobody else.
        """
        try:
            answers = await self._ask([q.query for q in batch], lambda: max(q.deadline for q in batch))
        except Exception as error:  # whatever it is belongs to those who wait
            if len(batch) > 1 and _may_be_one_query(error):
                await asyncio.gather(*(self._answer([question]) for question in batch))
                return
            for question in batch:
                self._open.pop(question.query, None)
                question.answer.set_exception(error)
            return
        for question, passages in zip(batch, answers, strict=True):
            self._open.pop(question.query, None)
            question.answer.set_result(passages)

    async def _ask(self, queries: Sequence[str], deadline: Callable[[], float]) -> list[Passages]:
        """Attempt until it works or the deadline (which may move while we wait) would pass.

        A server that failed is not asked again before the others were, and then after a pause.
        """
        start, attempts, rounds = time.monotonic(), 0, 0
        failed: list[Server] = []
        while True:
            in_time = not attempts or time.monotonic() < deadline()
            server = self._router.choose(avoid=failed) if in_time else None
            if server is not None:
                attempts += 1
                try:
                    return await self._attempt(server, queries, deadline())
                except _Trouble as trouble:
                    self._last_trouble = str(trouble)
                    failed.append(server)
                    continue
            left_s, rest_s = deadline() - time.monotonic(), self._router.rest_s()
            if left_s <= max(rest_s, _LAST_PAUSE_S):
                elapsed = f"{attempts} attempts in {time.monotonic() - start:.1f} s"
                raise self._unavailable(f"{elapsed}; last: {self._last_trouble}")
            rounds += 1
            pause_s = self._router.wait_s() or backoff_s(rounds, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            await asyncio.sleep(max(rest_s, min(pause_s, left_s / 2)))
            failed.clear()

    async def _attempt(self, server: Server, queries: Sequence[str], deadline: float) -> list[Passages]:
        """One request to one server, and what it says about the server's health."""
        timeout_s = min(self._timeout_s, max(deadline - time.monotonic(), 0.001))
        is_probe = server.begin()
        try:
            passages = await self._post(server, queries, timeout_s)
        except _Trouble as trouble:
            if trouble.pause_s:
                server.rests(trouble.pause_s)
            elif not isinstance(trouble.__cause__, TimeoutError) or timeout_s >= self._fair_s:
                server.fails(is_probe)
            raise
        except RetrieverError:
            server.works()  # what it refuses or mistakes is not a question of its health
            raise
        finally:
            server.end(is_probe)
        server.works()
        return passages

    async def _post(self, server: Server, queries: Sequence[str], timeout_s: float) -> list[Passages]:
        """One POST. Raises `_Trouble` for what may pass, else a `RetrieverError`."""
        assert self._session is not None
        body = {"queries": list(queries), "topk": self.topk, "return_scores": True}
        # the server may drop a request that nobody waits for any more
        headers = self._headers | {"X-Deadline-Ms": str(max(1, round(1000 * timeout_s)))}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.post(server.url, json=body, headers=headers, timeout=timeout) as response:
                payload = await response.read()
        except aiohttp.InvalidURL as error:
            raise self._unavailable(f"retriever.url: {server.name} is not an http:// or https:// URL") from error
        except TimeoutError as error:
            raise _Trouble(server, f"no answer to one request in {timeout_s:.1f} s") from error
        except aiohttp.ClientError as error:
            raise _Trouble(server, f"{type(error).__name__}: {error}") from error
        except ValueError as error:  # a token beside a user and password
            raise self._unavailable(f"retriever.url: {server.name}: {error}") from error
        if response.status in _RETRIED:
            pause_s = retry_after_s(response.headers.get("Retry-After"))
            raise _Trouble(server, f"HTTP {response.status}: {server_message(payload)}", pause_s)
        if response.status != 200:
            rejected = RetrieverRejected(
                f"retriever {server.name} refused the request with HTTP {response.status}: {server_message(payload)}"
            )
            rejected.status = response.status
            raise rejected
        return parse_reply(payload, len(queries), server.name)

    def _unavailable(self, reason: str) -> RetrieverUnavailable:
        return RetrieverUnavailable(
            f"retriever {self.name} is not available ({reason}); start one with: bash retrieval_launch.sh"
        )


def _may_be_one_query(error: Exception) -> bool:
    """Whether the others of its batch could be answered."""
    if isinstance(error, RetrieverRejected):
        return error.status in _BLAMES_A_QUERY
    return isinstance(error, RetrieverReplyError)
