"""A running retrieval server as a `Source`."""

from __future__ import annotations

import asyncio

from search_r1.http.address import addresses_of, check_addresses, without_credentials
from search_r1.search.client import RetrievalClient
from search_r1.search.server.source_interface import ScoredPassage


class HttpSource:
    """A running server as a `Source`. Score and id are None if it sends none."""

    num_passages: int | None = None
    version = ""  # that of the server, which may change
    batch_size: int | None = None

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` bounds a search with its retries. Raises `ValueError` if `url` is not an address."""
        check_addresses(addresses_of(url))
        self.name, self._url, self._timeout_s = without_credentials(url), url, timeout_s
        self._clients: dict[int, RetrievalClient] = {}  # by topk, which a client has one of

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`. Raises `RetrieverError`."""
        if k not in self._clients:
            self._clients[k] = RetrievalClient(self._url, topk=k, deadline_s=self._timeout_s)
        answers = await asyncio.gather(*map(self._clients[k].search, queries))
        return [[(passage, passage["score"]) for passage in passages] for passages in answers]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()
