"""Caches for repeated queries, bounded in bytes."""

from __future__ import annotations

from hashlib import blake2b

from cachetools import LRUCache

from search_r1.search.server.source_interface import EncodedHits

_ENTRY_BYTES = 400  # the key's tuple, the answer's tuple and the bookkeeping of both
_SCORE_BYTES = 300  # a digest, a float and their bookkeeping
_HIT_BYTES = 150  # a named tuple, a float and the header of a bytes object


class HitsCache:
    """The least recently used answers are evicted first. The key includes everything that an answer depends on."""

    def __init__(self, max_bytes: int, fingerprint: str) -> None:
        """`fingerprint` identifies the index, the encoder and their parameters. 0 bytes: no cache."""
        self._fingerprint = fingerprint
        self._answers: LRUCache[tuple[str, int, str], EncodedHits] = LRUCache(max_bytes, getsizeof=_size)

    @property
    def num_bytes(self) -> int:
        """Bytes in use, estimated."""
        return int(self._answers.currsize)

    def get(self, query: str, k: int) -> EncodedHits | None:
        return self._answers.get((query, k, self._fingerprint))

    def put(self, query: str, k: int, answer: EncodedHits) -> None:
        """Store an answer, unless it is larger than the whole cache."""
        if _size(answer) + 4 * len(query) <= self._answers.maxsize:
            self._answers[query, k, self._fingerprint] = answer


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


def _size(answer: EncodedHits) -> int:
    return _ENTRY_BYTES + sum(_HIT_BYTES + len(hit.document) for hit in answer)
