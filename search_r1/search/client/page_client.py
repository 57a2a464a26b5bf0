"""The asynchronous client of the route `/page`: the page to which a passage belongs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

import aiohttp

from search_r1.errors import RetrieverError, RetrieverReplyError, RetrieverUnavailable
from search_r1.http.client import addresses_of, backoff_s, check_addresses, entered_loop
from search_r1.search.client.exchange import FIRST_PAUSE_S, LONGEST_PAUSE_S, TemporaryFailure, send
from search_r1.search.client.replicas import Replica, ReplicaPool
from search_r1.search.client.retrieval_client import token_headers
from search_r1.search.sanitize import whole_characters
from url_text import without_credentials


class PageClient:
    """Asks for pages over HTTP, from one event loop at a time; `close` it before another loop uses it."""

    def __init__(
        self, url: str | Sequence[str], timeout_s: float = 10.0, deadline_s: float = 60.0, token: str | None = None
    ) -> None:
        """The addresses are those of `/retrieve`, as for `RetrievalClient`, which says what the arguments are."""
        self.urls = tuple(addresses_of(url))
        check_addresses(self.urls)
        self.name = ", ".join(map(without_credentials, self.urls))
        self._headers = token_headers(token)
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._replicas = ReplicaPool(self.urls)

    async def page(self, name: str, max_chars: int) -> dict[str, Any] | None:
        """The page of the passage with the id `name`: `title`, `text` (at most `max_chars` characters), `start`,
        `num_passages`, `truncated`. None if there is no such passage.

        Raises `RetrieverUnavailable` (no answer within the deadline), `RetrieverRejected` (HTTP 4xx, such as 404 of a
        server without pages) or `RetrieverReplyError` (the reply of something else).
        """
        self._attach()
        end = time.monotonic() + self._deadline_s
        failures: dict[Replica, TemporaryFailure] = {}
        rounds, last = 0, "none"
        while True:
            # Ask one server after the other, each once; then all of them again after a pause.
            left_s = end - time.monotonic()
            server = self._replicas.choose(avoid=failures) if left_s > 0 else None
            if server is not None:
                try:
                    return await self._attempt(server, name, max_chars, min(self._timeout_s, left_s))
                except TemporaryFailure as failure:
                    failures[server], last = failure, str(failure)
                    continue
            rounds += 1
            pause_s = max(self._replicas.wait_s(), backoff_s(rounds, FIRST_PAUSE_S, LONGEST_PAUSE_S))
            if pause_s >= left_s:
                raise RetrieverUnavailable(
                    f"retriever {self.name} is not available (no page in {self._deadline_s:g} s; last: {last}); "
                    "start one with: bash retrieval_launch.sh"
                )
            await asyncio.sleep(pause_s)
            failures.clear()

    async def close(self) -> None:
        """Close the connections. The client may be used again."""
        session, self._session, self._loop = self._session, None, None
        if session is not None:
            await session.close()

    async def _attempt(self, server: Replica, name: str, max_chars: int, timeout_s: float) -> dict[str, Any] | None:
        assert self._session is not None
        # The replica is told how the attempt went, so that one that fails is left alone for a while.
        body = {"id": whole_characters(name), "max_chars": max_chars}
        is_probe = server.begin()
        try:
            url = urljoin(server.url.rstrip("/"), "page")
            _, payload = await send(self._session, server, url, body, timeout_s, self._headers)
            server.record_success()
        except TemporaryFailure as failure:
            if failure.pause_s:
                server.pause(failure.pause_s)
            else:
                server.record_failure(is_probe)
            raise
        except RetrieverError:
            server.record_success()  # it answers, if only to refuse
            raise
        finally:
            server.end(is_probe)
        # Another program may answer at this address.
        try:
            found = whole_characters(json.loads(payload))["page"]
            if found is None or all(isinstance(found[key], str) for key in ("title", "text")):
                return found  # type: ignore[no-any-return]
            raise TypeError("a page without a title or a text")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RetrieverReplyError(
                f"{server.name} answered 200 but not with a page ({type(error).__name__}: {error}); check that "
                "retriever.url is the /retrieve route of a retrieval server"
            ) from error

    def _attach(self) -> None:
        loop = entered_loop(self._loop, "PageClient")
        if loop is not None:
            self._loop, self._replicas = loop, ReplicaPool(self.urls)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
