"""Several retrievers as one, by reciprocal rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009).

score(row) = sum over the retrievers that found it of 1 / (60 + its rank there), ranks from 1. Scores of different
scales are never compared, so nothing has to be tuned.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence

from search_r1.errors import IndexMismatchError
from search_r1.search.retriever import Hit, Retriever

_RANK_CONSTANT = 60
_DEPTH = 100


class HybridRetriever:
    """Fuses the best 100 rows of every part; for k up to 100, a smaller k gives a prefix of the same result."""

    def __init__(self, parts: Sequence[Retriever]) -> None:
        """Raises `IndexMismatchError` unless there are two or more parts with equally many rows."""
        sizes = [(part.name, len(part)) for part in parts]
        if len(parts) < 2 or len({size for _, size in sizes}) != 1:
            raise IndexMismatchError(f"fusion needs two or more indexes of the same corpus, not {sizes}")
        self.name = "hybrid"
        names = [getattr(part, "fingerprint", part.name) for part in parts]
        self.fingerprint = hashlib.sha256("\n".join([*names, str(_DEPTH)]).encode()).hexdigest()
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts[0])

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; the score is the sum of the reciprocal ranks, at most (number of parts) / 61."""
        found = [part.search(queries, max(k, _DEPTH)) for part in self._parts]
        return [fuse(lists, k) for lists in zip(*found, strict=True)]


def fuse(lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """The best `k` rows of ranked lists, by reciprocal rank fusion."""
    shares: dict[int, list[float]] = defaultdict(list)
    for hits in lists:
        for rank, hit in enumerate(hits, start=1):
            shares[hit.row].append(1 / (_RANK_CONSTANT + rank))
    fused = [Hit(row, math.fsum(parts)) for row, parts in shares.items()]  # fsum: the order of the parts is no matter
    return sorted(fused, key=lambda hit: (-hit.score, hit.row))[:k]
