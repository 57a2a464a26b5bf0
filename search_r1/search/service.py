"""Queries in, passages out: one thread owns the retriever, a cache answers repeats."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cachetools import LRUCache

from search_r1.search.corpus import Corpus
from search_r1.search.errors import IndexMismatchError
from search_r1.search.retriever import Retriever

Found = tuple[dict[str, Any], float]  # a passage of the corpus and its score


class RetrievalService:
    """Joins a retriever to its corpus. Call it from one event loop.

    The single worker thread keeps the event loop free and the index from concurrent calls, which neither FAISS on a
    GPU nor the stemmer allows.
    """

    def __init__(self, retriever: Retriever, corpus: Corpus, cache_passages: int = 50_000) -> None:
        """`cache_passages` bounds the passages kept for repeated (query, k). Raises `IndexMismatchError`."""
        if len(retriever) != len(corpus):
            raise IndexMismatchError(
                f"the {retriever.name} index has {len(retriever)} rows, corpus {corpus.path} has {len(corpus)}; "
                "use the corpus the index was built from"
            )
        self.retriever = retriever
        self.corpus = corpus
        self._cache: LRUCache[tuple[str, int], list[Found]] = LRUCache(
            cache_passages, getsizeof=lambda hits: 1 + len(hits)
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retriever")

    async def search(self, queries: list[str], k: int) -> list[list[Found]]:
        """At most `k` passages for each query, in order. A blank query finds nothing."""
        answers = {query: self._known(query, k) for query in queries}
        missing = [query for query, found in answers.items() if found is None]
        if missing:
            found = await asyncio.get_running_loop().run_in_executor(self._worker, self._look_up, missing, k)
            answers.update(zip(missing, found, strict=True))
            self._remember(missing, k, found)
        return [answers[query] or [] for query in queries]

    def close(self) -> None:
        """Let the running search end and drop the ones that wait."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _known(self, query: str, k: int) -> list[Found] | None:
        return self._cache.get((query, k)) if query.strip() else []

    def _remember(self, queries: list[str], k: int, found: list[list[Found]]) -> None:
        for query, passages in zip(queries, found, strict=True):
            if len(passages) < self._cache.maxsize:
                self._cache[query, k] = passages

    def _look_up(self, queries: list[str], k: int) -> list[list[Found]]:
        return [[(self.corpus[hit.row], hit.score) for hit in hits] for hits in self.retriever.search(queries, k)]
