"""The local index as a source: one thread owns the retriever, all requests share batches, a cache answers repeats."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from search_r1.errors import IndexMismatchError, SearchError, SearchFailed
from search_r1.http.gate import Metrics
from search_r1.search.corpus import Corpus
from search_r1.search.pages import Page, Pages
from search_r1.search.retriever import Hit, Retriever
from search_r1.search.server.batching import Batcher, BatchLimits, attempt, attempt_each
from search_r1.search.server.cache import HitsCache
from search_r1.search.server.source_interface import (
    EncodedHit,
    EncodedHits,
    Outcome,
    ScoredPassage,
    decode_hits,
    encode,
    hits_or_raise,
    version_of,
)

_WARM_UP_WORDS = 8


@dataclass(frozen=True)
class ServiceOptions(BatchLimits):
    """Batch limits, and `cache_mib`: MiB of cached answers for repeated (query, k), 0 for none."""

    cache_mib: float = 128.0


class RetrievalService:
    """A `Source` made of a retriever and its corpus. Call it from one event loop.

    The owner thread keeps the event loop responsive, and protects the index from concurrent calls, which neither FAISS
    on a GPU nor the stemmer allows. Runs of white space in a query count as one space.
    """

    batch_size: int | None = None

    def __init__(
        self,
        retriever: Retriever,
        corpus: Corpus,
        options: ServiceOptions | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        """Raises `IndexMismatchError` if the index does not have as many rows as the corpus."""
        if len(retriever) != len(corpus):
            raise IndexMismatchError(
                f"the {retriever.name} index has {len(retriever)} rows, corpus {corpus.path} has {len(corpus)}; "
                "use the corpus the index was built from"
            )
        options = options or ServiceOptions()
        self.retriever = retriever
        self.corpus = corpus
        self.metrics = metrics or Metrics()
        self.name = retriever.name
        self.num_passages: int | None = len(corpus)
        fingerprint = getattr(retriever, "fingerprint", retriever.name)
        self.version = version_of(fingerprint, corpus.digest, corpus.checksum)
        self._cache = HitsCache(int(options.cache_mib * 2**20), fingerprint)
        self._counts = self.metrics.search
        self._counts.cache_bytes.set_function(lambda: self._cache.num_bytes)
        self._pages = Pages(corpus)
        # one thread: a request that waits for the ids to be read holds up nothing else
        self._page_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pages")
        self._batcher: Batcher[str, EncodedHits] = Batcher(self._run, self._cache.put, options, self._counts)

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`."""
        return decode_hits(await self.search_encoded(queries, k))

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`. `wait_s` is not used: the caller cancels the call at its deadline."""
        plain = [" ".join(query.split()) for query in queries]
        found: dict[str, Outcome | None] = {query: self._known(query, k) for query in plain}
        missing = [query for query, answer in found.items() if answer is None]
        self._counts.cache_misses.inc(len(missing))
        if missing:
            found.update(zip(missing, await self._batcher.ask(missing, k), strict=True))
        return [found[query] or () for query in plain]

    async def warm_up(self) -> None:
        """Run one query through the index: words of the first row, so that it finds something. Raises `SearchError`."""
        words = str(self.corpus[0]["contents"]).split()[:_WARM_UP_WORDS]
        hits_or_raise(await self._batcher.ask([" ".join(words)], 1))

    async def page(self, name: str, max_chars: int) -> Page | None:
        """See `HasPages`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._page_thread, self._pages.find, name, max_chars)

    def close(self) -> None:
        """Let the running batch finish; waiting requests fail."""
        self._pages.close()
        self._page_thread.shutdown(wait=False, cancel_futures=True)
        self._batcher.close()

    def _known(self, query: str, k: int) -> EncodedHits | None:
        if not query:
            return ()
        answer = self._cache.get(query, k)
        if answer is not None:
            self._counts.cache_hits.inc()
        return answer

    def _run(self, queries: list[str], k: int) -> list[Outcome]:
        """The hits or the error of each query; one that fails does not affect the others."""
        who = f"the {self.name} retriever"
        found = attempt_each(partial(self.retriever.search, k=min(k, len(self.retriever))), queries, who)
        return [hits if isinstance(hits, SearchError) else attempt(partial(self._fetch, hits), who) for hits in found]

    def _fetch(self, hits: list[Hit]) -> EncodedHits:
        for hit in hits:
            if not math.isfinite(hit.score):
                raise SearchFailed(f"the {self.name} retriever scored row {hit.row} with {hit.score}")
        return tuple(EncodedHit(encode(self.corpus[hit.row]), hit.score) for hit in hits)
