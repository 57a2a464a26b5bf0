"""The inner loops of BM25, compiled: they touch only the rows that share a term with a query, and release the GIL.

The index is a sparse matrix by columns (CSC): column c, a term, has the weights `data[p]` of the rows `indices[p]` for
p in [indptr[c], indptr[c + 1]), rows ascending. All additions are float32, in the order of the query's terms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call; keep the machine code where it is found again, unless no folder can be written to."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither __pycache__, the user's cache nor NUMBA_CACHE_DIR is writable
        return njit(nogil=True)(function)


@compiled
def _is_worse(score: float, row: int, other_score: float, other_row: int) -> bool:
    return score < other_score or (score == other_score and row > other_row)


@compiled
def _swap(scores: np.ndarray, rows: np.ndarray, one: int, other: int) -> None:
    scores[one], scores[other] = scores[other], scores[one]
    rows[one], rows[other] = rows[other], rows[one]


@compiled
def _sift_down(scores: np.ndarray, rows: np.ndarray, size: int) -> None:
    """Restore the heap, worst hit at 0, after a change at 0."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _is_worse(scores[child + 1], rows[child + 1], scores[child], rows[child]):
            child += 1
        if not _is_worse(scores[child], rows[child], scores[at], rows[at]):
            return
        _swap(scores, rows, at, child)
        at = child


@compiled
def _sift_up(scores: np.ndarray, rows: np.ndarray, at: int) -> None:
    """Restore the heap after an entry was added at `at`."""
    while at > 0:
        parent = (at - 1) // 2
        if not _is_worse(scores[at], rows[at], scores[parent], rows[parent]):
            return
        _swap(scores, rows, at, parent)
        at = parent


@compiled
def _best_first(scores: np.ndarray, rows: np.ndarray, size: int) -> None:
    """Turn the heap into a list, best first: the worst of what is left goes to the end."""
    for end in range(size - 1, 0, -1):
        _swap(scores, rows, 0, end)
        _sift_down(scores, rows, end)


@compiled
def search_columns(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    columns: np.ndarray,
    bounds: np.ndarray,
    scratch: np.ndarray,
    scores: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Write the best hits of Q queries by (score descending, row ascending), only those with a score above 0.

    Query q asks for `columns[bounds[q]:bounds[q + 1]]` (int64, repeats count). `scratch` is float32 [index rows], all 0
    before and after. Out: `scores` float32 and `rows` int64 [Q, k], k >= 1, valid up to `counts` int64 [Q].
    """
    k = scores.shape[1]
    for query in range(len(counts)):
        asked = columns[bounds[query] : bounds[query + 1]]
        for column in asked:
            for p in range(indptr[column], indptr[column + 1]):
                scratch[indices[p]] += data[p]
        best, best_rows, size = scores[query], rows[query], 0
        for column in asked:
            for p in range(indptr[column], indptr[column + 1]):
                row = indices[p]
                score = scratch[row]
                scratch[row] = 0.0  # also keeps a row of several columns from being a hit twice
                if not score > 0.0:
                    continue
                if size < k:
                    best[size], best_rows[size] = score, row
                    _sift_up(best, best_rows, size)
                    size += 1
                elif _is_worse(best[0], best_rows[0], score, row):
                    best[0], best_rows[0] = score, row
                    _sift_down(best, best_rows, size)
        _best_first(best, best_rows, size)
        counts[query] = size
