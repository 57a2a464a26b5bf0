"""Answers kept for repeated queries, bounded by their bytes."""

from __future__ import annotations

from cachetools import LRUCache

from search_r1.search.source import Answer

_ENTRY_BYTES = 400  # the key's tuple, the answer's tuple and the bookkeeping of both
_HIT_BYTES = 150  # a named tuple, a float and the header of a bytes object


class AnswerCache:
    """The least recently used answers go first. The key holds all that an answer depends on."""

    def __init__(self, max_bytes: int, fingerprint: str) -> None:
        """`fingerprint` stands for the index, the encoder and their parameters. 0 bytes: nothing is kept."""
        self._fingerprint = fingerprint
        self._answers: LRUCache[tuple[str, int, str], Answer] = LRUCache(max_bytes, getsizeof=_size)

    @property
    def num_bytes(self) -> int:
        """Bytes in use, estimated."""
        return int(self._answers.currsize)

    def get(self, query: str, k: int) -> Answer | None:
        return self._answers.get((query, k, self._fingerprint))

    def put(self, query: str, k: int, answer: Answer) -> None:
        """An answer larger than the whole cache is not kept."""
        if _size(answer) + 4 * len(query) <= self._answers.maxsize:
            self._answers[query, k, self._fingerprint] = answer


def _size(answer: Answer) -> int:
    return _ENTRY_BYTES + sum(_HIT_BYTES + len(hit.document) for hit in answer)
