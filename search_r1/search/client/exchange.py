"""One HTTP request of the client to a retrieval server: the queries that wait for an answer, with their deadlines and
failures, and what comes of them: passages, a temporary failure, or an error.

Anything that is not a retrieval reply is an error, never an empty result.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from search_r1.errors import RetrieverQueryFailed, RetrieverRejected, RetrieverReplyError, RetrieverUnavailable
from search_r1.http.client import (
    SHOWN_CHARS,
    backoff_s,
    is_temporary,
    may_blame_query,
    retry_after_s,
    server_message,
)
from search_r1.search.client.replicas import Replica
from search_r1.search.sanitize import whole_characters
from url_text import without_credentials

Passages = list[dict[str, Any]]


@dataclass(frozen=True)
class QueryFailure:
    """Why one query of several has no passages: the status and message that a request for it alone would have had."""

    status: int
    detail: str
    retry_after_s: float = 0.0


def parse_reply(payload: bytes, num_queries: int, url: str) -> list[Passages | QueryFailure]:
    """The passages of each query, or why it has none. Raises `RetrieverReplyError`.

    Accepts `{"document": {...}, "score": x}`, a document that is a string (the published reranking server), and bare
    documents. Each passage has `contents`; a missing `id` or `score` becomes None, and half a character U+FFFD.
    """
    try:
        reply = whole_characters(json.loads(payload))
        result, errors = reply["result"], reply.get("errors") or {}
        if len(result) != num_queries:
            raise ValueError(f"{len(result)} results for {num_queries} queries")
        # Our own server reports a query that failed beside the results of the others.
        outcomes: list[Passages | QueryFailure] = []
        for number, items in enumerate(result):
            if str(number) in errors:
                outcomes.append(_failure(errors[str(number)]))
                continue
            if not isinstance(items, list):
                raise TypeError(f"the result of a query is a {type(items).__name__}, not a list")
            outcomes.append([_passage(item) for item in items])
        return outcomes
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        shown = payload[:SHOWN_CHARS].decode("utf-8", "replace")
        raise RetrieverReplyError(
            f"{url} answered 200 but not with a retrieval reply ({type(error).__name__}: {error}): {shown!r}; "
            "check that retriever.url is the /retrieve route of a retrieval server"
        ) from error


def _failure(error: Any) -> QueryFailure:
    detail = without_credentials(str(error["detail"])[:SHOWN_CHARS])
    return QueryFailure(int(error["status"]), detail, max(0.0, float(error.get("retry_after_s", 0.0))))


def _passage(item: Any) -> dict[str, Any]:
    document = item.get("document", item) if isinstance(item, dict) else item
    passage = {"contents": document} if isinstance(document, str) else dict(document)
    if not isinstance(passage.get("contents"), str):
        raise TypeError("a document without 'contents'")
    score = item.get("score") if isinstance(item, dict) else None
    return passage | {"id": passage.get("id"), "score": score}


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
_ENGINE_REFUSED = 424  # the status of a server whose online engine would not answer one of the queries
FAILED = 500  # the status of a server that cannot answer a query, or any
_MOST_FAILURES = 5  # of one query in a request of its own, while other queries are answered


class PendingQuery:
    """A query and the future that its callers await; `deadline` (monotonic seconds) is the latest of the callers'."""

    def __init__(self, query: str, loop: asyncio.AbstractEventLoop, num_answered: int) -> None:
        """`num_answered` is how many queries the client has had answered so far."""
        self.query = query
        self.deadline = 0.0
        self.answer: asyncio.Future[Passages] = loop.create_future()
        # no warning at exit about an error that no caller awaits any more
        self.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._num_answered_before = num_answered
        self._num_failures = self._num_pauses = 0

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def end(self, outcome: Passages | Exception) -> None:
        """Set the result or the exception of the future."""
        if isinstance(outcome, Exception):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)

    def failed_alone(self, num_answered: int, message: str) -> None:
        """The server answered HTTP 500 to a request with this query alone.

        Raises `RetrieverQueryFailed` if that happened several times while other queries were answered: the server
        works, but not for this query.
        """
        self._num_failures += 1
        if self._num_failures >= _MOST_FAILURES and num_answered > self._num_answered_before:
            times = f"the retriever answers other queries, but failed on this one {self._num_failures} times"
            raise RetrieverQueryFailed(f"{times}; last: {message}")

    def pause_after(self, failure: QueryFailure, num_answered: int, retriever: str) -> float:
        """Seconds until the next attempt. Raises a `RetrieverError` if there is no further attempt."""
        message = f"retriever {retriever}: HTTP {failure.status}: {failure.detail}"
        if not is_temporary(failure.status):
            rejected = RetrieverRejected(f"{message}; the server rejects this query")
            rejected.status = failure.status
            raise rejected
        if failure.status == FAILED:
            self.failed_alone(num_answered, message)
        # The pauses grow, and are never shorter than what the server asked for.
        self._num_pauses += 1
        pause_s = max(failure.retry_after_s, backoff_s(self._num_pauses, FIRST_PAUSE_S, LONGEST_PAUSE_S))
        if pause_s >= self.left_s():
            raise RetrieverUnavailable(f"{message}; no time is left for a retry within retriever.deadline_s")
        return pause_s


def may_be_one_query(error: Exception) -> bool:
    """Whether one query may be to blame, so that the others of the batch can be answered."""
    refused = isinstance(error, RetrieverRejected) and (
        may_blame_query(error.status) or error.status == _ENGINE_REFUSED
    )
    return refused or isinstance(error, RetrieverReplyError | RetrieverQueryFailed)


class TemporaryFailure(Exception):
    """An attempt failed in a way that a retry may fix; `pause_s` is the value of Retry-After.

    `failed`: the server answered HTTP 500, which may be the fault of one query.
    """

    def __init__(self, server: Replica, cause: str, pause_s: float = 0.0, failed: bool = False) -> None:
        super().__init__(f"{server.name}: {without_credentials(cause)}")
        self.pause_s, self.failed = pause_s, failed


@dataclass(frozen=True)
class ServerReply:
    """The outcome of each query, in order, and what the server reports about itself, if it does."""

    outcomes: list[Passages | QueryFailure]
    index_version: str | None
    batch_size: int | None


async def post(
    session: aiohttp.ClientSession,
    server: Replica,
    queries: Sequence[str],
    topk: int,
    timeout_s: float,
    headers: Mapping[str, str],
) -> ServerReply:
    """One POST request. Raises `TemporaryFailure` if a retry may help, else a `RetrieverError`."""
    # The published request, and a header of our own server, which others ignore.
    body = {"queries": list(queries), "topk": topk, "return_scores": True}
    # the server may tell the errors of single queries apart
    response, payload = await send(session, server, server.url, body, timeout_s, {**headers, "X-Query-Errors": "each"})
    outcomes = parse_reply(payload, len(queries), server.name)
    size = response.headers.get("X-Batch-Size", "")
    batch_size = int(size) if size.isdecimal() and int(size) > 0 else None
    return ServerReply(outcomes, response.headers.get("X-Index-Version"), batch_size)


async def send(
    session: aiohttp.ClientSession,
    server: Replica,
    url: str,
    body: Mapping[str, Any],
    timeout_s: float,
    headers: Mapping[str, str],
) -> tuple[aiohttp.ClientResponse, bytes]:
    """POST to a route of a server: its reply with HTTP 200. Raises as `post`."""
    # the server may drop a request that nobody waits for any more
    own = {"X-Deadline-Ms": str(max(1, round(1000 * timeout_s)))}
    # What the connection did: nothing but a wrong address is final.
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(url, json=body, headers={**headers, **own}, timeout=timeout) as response:
            payload = await response.read()
    except aiohttp.InvalidURL as error:
        raise RetrieverUnavailable(f"retriever.url: {server.name} is not an http:// or https:// URL") from error
    except TimeoutError as error:
        raise TemporaryFailure(server, f"no answer to one request in {timeout_s:.1f} s") from error
    except aiohttp.ClientError as error:
        raise TemporaryFailure(server, f"{type(error).__name__}: {error}") from error
    except ValueError as error:  # a token beside a user and password
        raise RetrieverUnavailable(f"retriever.url: {server.name}: {error}") from error
    # What the server said.
    if response.status != 200:
        raise _refusal(server, response, payload)
    return response, payload


def _refusal(server: Replica, response: aiohttp.ClientResponse, payload: bytes) -> TemporaryFailure | RetrieverRejected:
    status, message = response.status, server_message(payload)
    if is_temporary(status):
        pause_s = retry_after_s(response.headers.get("Retry-After"))
        return TemporaryFailure(server, f"HTTP {status}: {message}", pause_s, status == FAILED)
    rejected = RetrieverRejected(f"retriever {server.name} refused the request with HTTP {status}: {message}")
    rejected.status = status
    return rejected
