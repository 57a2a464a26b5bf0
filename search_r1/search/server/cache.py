"""Caches for repeated queries, bounded in bytes."""

from __future__ import annotations

from hashlib import blake2b
from sys import getsizeof

from cachetools import LRUCache

from search_r1.search.server.source_interface import EncodedHits

_ENTRY_BYTES = 400  # the tuples of the key, the entry and the answer, and the bookkeeping of all
_SCORE_BYTES = 300  # a digest, a float and their bookkeeping
_HIT_BYTES = 150  # a named tuple, a float and the header of a bytes object


class HitsCache:
    """The least recently used answers are evicted first. The key includes everything that an answer depends on."""

    def __init__(self, max_bytes: int, fingerprint: str) -> None:
        """`fingerprint` identifies the index, the encoder and their parameters. 0 bytes: no cache."""
        self._fingerprint = fingerprint
        # The query is kept beside its answer because the cache sizes values only: a long query may have a short answer.
        self._answers: LRUCache[tuple[str, int, str], tuple[str, EncodedHits]] = LRUCache(max_bytes, getsizeof=_size)

    @property
    def num_bytes(self) -> int:
        """Bytes in use, estimated."""
        return int(self._answers.currsize)

    def get(self, query: str, k: int) -> EncodedHits | None:
        found = self._answers.get((query, k, self._fingerprint))
        return None if found is None else found[1]

    def put(self, query: str, k: int, answer: EncodedHits) -> None:
        """Store an answer, unless it is larger than the whole cache."""
        if _size((query, answer)) <= self._answers.maxsize:
            self._answers[query, k, self._fingerprint] = query, answer


class ScoreCache:
    """One model's scores of pairs of a query and a passage. The least recently used are evicted first."""

    def __init__(self, max_bytes: int) -> None:
        """0 bytes: nothing is kept."""
        self._scores: LRUCache[bytes, float] = LRUCache(max_bytes // _SCORE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes in use, estimated."""
        return len(self._scores) * _SCORE_BYTES

    def get(self, query: str, passage: str) -> float | None:
        return self._scores.get(_key(query, passage))

    def put(self, query: str, passage: str, score: float) -> None:
        if self._scores.maxsize:
            self._scores[_key(query, passage)] = score


def _key(query: str, passage: str) -> bytes:
    """A digest: the texts are a hundred times larger than the score."""
    return blake2b(f"{len(query)} {query}{passage}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _size(entry: tuple[str, EncodedHits]) -> int:
    query, answer = entry
    return _ENTRY_BYTES + getsizeof(query) + sum(_HIT_BYTES + len(hit.document) for hit in answer)
