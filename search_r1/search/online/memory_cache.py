"""Answers of online engines for as long as the process lives, so that nothing is paid twice by default."""

from __future__ import annotations

import time

from cachetools import LRUCache

from search_r1.http.response_cache import RequestKey

_MAX_BYTES = 256 << 20
_ENTRY_BYTES = 300  # the digest, the tuple and their bookkeeping


class MemoryCache:
    """A `ResponseCache` without a file, in the mode record; the least recently used answers are evicted first."""

    def __init__(self, keep_s: float, keep_empty_s: float) -> None:
        self._keep_s, self._keep_empty_s = keep_s, keep_empty_s
        self._answers: LRUCache[str, tuple[str, float]] = LRUCache(_MAX_BYTES, getsizeof=_size)

    def get(self, key: RequestKey) -> str | None:
        """The stored body, or None if there is none that is recent enough."""
        body, expires = self._answers.get(key.digest, ("", 0.0))
        return body if time.monotonic() < expires else None

    def put(self, key: RequestKey, body: str, is_empty: bool) -> None:
        """Store a body, replacing an earlier one; `is_empty`: it holds no results."""
        entry = body, time.monotonic() + (self._keep_empty_s if is_empty else self._keep_s)
        if _size(entry) <= self._answers.maxsize:
            self._answers[key.digest] = entry

    def close(self) -> None:
        self._answers.clear()


def _size(entry: tuple[str, float]) -> int:
    return _ENTRY_BYTES + len(entry[0].encode("utf-8", "surrogatepass"))
