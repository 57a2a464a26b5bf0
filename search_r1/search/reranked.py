"""A source behind a reranker: it finds candidates, the reranker chooses among them."""

from __future__ import annotations

import inspect
import math
from functools import partial

from search_r1.search.errors import SearchError
from search_r1.search.reranker import Reranker
from search_r1.search.source import (
    EncodedSearch,
    Found,
    NeedsWarmUp,
    Outcome,
    Source,
    decode_answers,
    encoded_search,
    version_of,
)


class RerankedSource:
    """A `Source` whose scores are those of the reranker; documents stay as the source gives them."""

    def __init__(self, source: Source, reranker: Reranker, num_candidates: int) -> None:
        """`num_candidates`: passages a query that the reranker reads, where nothing else is said."""
        self.name = f"{source.name}, reranked by {reranker.name}"
        self.num_passages, self.batch_size = source.num_passages, source.batch_size
        self.version = version_of(source.version, reranker.version, num_candidates)
        self._source = source
        self._reranker = reranker
        self._find = encoded_search(source)
        self._num_candidates = num_candidates

    async def search(self, queries: list[str], k: int) -> list[list[Found]]:
        """See `Source.search`."""
        return decode_answers(await self.search_encoded(queries, k))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`."""
        return await self.search_among(self._num_candidates, queries, k, wait_s)

    def among(self, num_candidates: int | None) -> EncodedSearch:
        """The search with another number of candidates; None: the usual one."""
        return partial(self.search_among, num_candidates or self._num_candidates)

    async def search_among(
        self, num_candidates: int, queries: list[str], k: int, wait_s: float = math.inf
    ) -> list[Outcome]:
        """The best `k` of `num_candidates` passages a query, or of `k` where that is more. See `EncodedSearch`."""
        found = await self._find(queries, max(k, num_candidates), wait_s)
        documents = [[] if isinstance(hits, SearchError) else [hit.document for hit in hits] for hits in found]
        best = await self._reranker.rerank(queries, documents, k)
        return [before if isinstance(before, SearchError) else after for before, after in zip(found, best, strict=True)]

    async def warm_up(self) -> None:
        """Run one search and score one pair. Raises `SearchError`."""
        if isinstance(self._source, NeedsWarmUp):
            await self._source.warm_up()
        await self._reranker.warm_up()

    async def close(self) -> None:
        """Let both end what runs and fail whoever waits."""
        closing = self._source.close()
        if inspect.isawaitable(closing):
            await closing
        self._reranker.close()
