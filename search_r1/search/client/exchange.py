"""One HTTP request to a retrieval server, as the client sees it: a reply, a temporary failure, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from search_r1.errors import RetrieverRejected, RetrieverUnavailable
from search_r1.http.address import without_credentials
from search_r1.http.error_replies import is_temporary, retry_after_s, server_message
from search_r1.search.client.pending_query import FAILED
from search_r1.search.client.replicas import Replica
from search_r1.search.client.reply import Passages, QueryFailure, parse_reply


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
    # The published request, and two headers of our own server, which others ignore.
    body = {"queries": list(queries), "topk": topk, "return_scores": True}
    # the server may drop a request that nobody waits for any more, and tell the errors of single queries apart
    own = {"X-Deadline-Ms": str(max(1, round(1000 * timeout_s))), "X-Query-Errors": "each"}
    # What the connection did: nothing but a wrong address is final.
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(server.url, json=body, headers={**headers, **own}, timeout=timeout) as response:
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
    outcomes = parse_reply(payload, len(queries), server.name)
    size = response.headers.get("X-Batch-Size", "")
    batch_size = int(size) if size.isdecimal() and int(size) > 0 else None
    return ServerReply(outcomes, response.headers.get("X-Index-Version"), batch_size)


def _refusal(server: Replica, response: aiohttp.ClientResponse, payload: bytes) -> TemporaryFailure | RetrieverRejected:
    status, message = response.status, server_message(payload)
    if is_temporary(status):
        pause_s = retry_after_s(response.headers.get("Retry-After"))
        return TemporaryFailure(server, f"HTTP {status}: {message}", pause_s, status == FAILED)
    rejected = RetrieverRejected(f"retriever {server.name} refused the request with HTTP {status}: {message}")
    rejected.status = status
    return rejected
