"""Ranks the documents of queries with a cross-encoder: all requests share batches, a cache answers repeated pairs."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from search_r1.errors import SearchError, SearchFailed
from search_r1.http.gate import Metrics
from search_r1.search.rerank.cross_encoder import CrossEncoder, Pair
from search_r1.search.server.batching import Batcher, BatchLimits, attempt_each
from search_r1.search.server.cache import ScoreCache
from search_r1.search.server.source_interface import (
    EncodedHit,
    EncodedSearch,
    NeedsWarmUp,
    Outcome,
    ScoredPassage,
    Source,
    decode_hits,
    encoded_search,
    version_of,
)

_SCORES_A_PAIR = 1  # in place of the k of a search: all pairs may share a batch


@dataclass(frozen=True)
class RerankLimits(BatchLimits):
    """Batch limits, in pairs, and `cache_mib`: MiB of cached scores for repeated pairs, 0 for none."""

    max_queue: int = 65_536
    cache_mib: float = 32.0


class Reranker:
    """A cross-encoder behind a queue. Call it from one event loop; a separate thread runs the model."""

    num_passages: int | None = None
    batch_size: int | None = None

    def __init__(self, model: CrossEncoder, limits: RerankLimits | None = None, metrics: Metrics | None = None) -> None:
        limits = limits or RerankLimits()
        self.name = model.name
        # The version names what a score depends on: the weights, where a text is cut, and the number format.
        parts = (getattr(model, name, None) for name in ("fingerprint", "max_length", "precision"))
        self.version = version_of(model.name, *parts)
        self.metrics = metrics or Metrics()
        self._model = model
        self._counts = self.metrics.rerank
        self._cache = ScoreCache(int(limits.cache_mib * 2**20))
        self._counts.cache_bytes.set_function(lambda: self._cache.num_bytes)
        self._batcher: Batcher[Pair, float] = Batcher(
            self._run, lambda pair, _, score: self._cache.put(*pair, score), limits, self._counts
        )

    async def rerank(self, queries: Sequence[str], documents: Sequence[Sequence[bytes]], k: int) -> list[Outcome]:
        """The best `k` documents of each query among its own, best first; ties keep the given order.

        A document is JSON with `contents`; equal contents have equal scores. If a pair of a query fails, the query gets
        the error instead of an answer. Raises `ServiceUnavailable` if the queue is full. A cancelled call gives up its
        place in the queue.
        """
        pairs = [
            [Pair(query, passage_text(json.loads(document)["contents"])) for document in own]
            for query, own in zip(queries, documents, strict=True)
        ]
        scores = await self._scores(list(dict.fromkeys(pair for own in pairs for pair in own)))
        return [_best(own, [scores[pair] for pair in of_one], k) for own, of_one in zip(documents, pairs, strict=True)]

    async def warm_up(self) -> None:
        """Score one pair. Raises `SearchError`."""
        (score,) = await self._batcher.ask([Pair("warm", "up")], _SCORES_A_PAIR)
        if isinstance(score, SearchError):
            raise score

    def close(self) -> None:
        """Let the running batch finish; waiting requests fail."""
        self._batcher.close()

    async def _scores(self, pairs: list[Pair]) -> dict[Pair, float | SearchError]:
        """The score or the error of each of the distinct pairs."""
        scores: dict[Pair, float | SearchError] = {}
        for pair in pairs:
            score = self._cache.get(*pair)
            if score is not None:
                scores[pair] = score
        missing = [pair for pair in pairs if pair not in scores]
        self._counts.cache_hits.inc(len(scores))
        self._counts.cache_misses.inc(len(missing))
        if missing:
            scores.update(zip(missing, await self._batcher.ask(missing, _SCORES_A_PAIR), strict=True))
        return scores

    def _run(self, pairs: list[Pair], _: int) -> list[float | SearchError]:
        """The score or the error of each pair; one that fails does not affect the others."""
        who = f"the reranker {self.name}"
        scores = attempt_each(lambda pairs: self._model.score(pairs).tolist(), pairs, who)
        for place, score in enumerate(scores):
            if isinstance(score, float) and not math.isfinite(score):
                scores[place] = SearchFailed(f"{who} scored a passage with {score}")
        return scores


def passage_text(contents: str) -> str:
    """A passage as the model reads it; the first line of `contents` is its title and keeps its quotes."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"


def _best(documents: Sequence[bytes], scores: Sequence[float | SearchError], k: int) -> Outcome:
    hits: list[EncodedHit] = []
    for document, score in zip(documents, scores, strict=True):
        if isinstance(score, SearchError):
            return score
        hits.append(EncodedHit(document, score))
    return tuple(sorted(hits, key=lambda hit: -hit.score)[:k])


class RerankedSource:
    """A `Source` with the reranker's scores and ranking; documents are those of `source`, unchanged."""

    def __init__(self, source: Source, reranker: Reranker, num_candidates: int) -> None:
        """`num_candidates`: passages per query that the reranker reads, unless a request says otherwise."""
        self.name = f"{source.name}, reranked by {reranker.name}"
        self.num_passages, self.batch_size = source.num_passages, source.batch_size
        self.version = version_of(source.version, reranker.version, num_candidates)
        self._source = source
        self._reranker = reranker
        self._find = encoded_search(source)
        self._num_candidates = num_candidates

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`."""
        return decode_hits(await self.search_encoded(queries, k))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`."""
        return await self.search_among(self._num_candidates, queries, k, wait_s)

    def among(self, num_candidates: int | None) -> EncodedSearch:
        """The search with another number of candidates; None: the default."""
        return partial(self.search_among, num_candidates or self._num_candidates)

    async def search_among(
        self, num_candidates: int, queries: list[str], k: int, wait_s: float = math.inf
    ) -> list[Outcome]:
        """The best `k` of `num_candidates` passages per query, or of `k` if that is more. See `EncodedSearch`."""
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
        """Let both finish their running batch; waiting requests fail."""
        closing = self._source.close()
        if inspect.isawaitable(closing):
            await closing
        self._reranker.close()
