"""The inner loops of BM25, compiled: they release the GIL.

The index is a sparse matrix by columns (CSC): column c, a term, has the weights `data[p]` >= 0 of the rows `indices[p]`
for p in [indptr[c], indptr[c + 1]), rows ascending. All additions are float32, in the order of the query's terms.

A query processes the rows block by block, so that the sums of a block stay in the cache. In a block with many weights
all sums are then scanned in order; in one with few, only the sums of their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

BLOCK_ROWS = 1 << 15  # 128 KiB of sums
RUN_ROWS = 256
_SPARSE = 8  # looking a sum up costs as much as looking through so many


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call, and cache the machine code on disk unless no folder is writable."""
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
def _keep_best(scores: np.ndarray, rows: np.ndarray, size: int, score: float, row: int) -> int:
    """Put a hit into the heap of the best `len(scores)`; returns its new size."""
    if size < len(scores):
        scores[size], rows[size] = score, row
        _sift_up(scores, rows, size)
        return size + 1
    if _is_worse(scores[0], rows[0], score, row):
        scores[0], rows[0] = score, row
        _sift_down(scores, rows, size)
    return size


@compiled
def first_bad_column(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, num_rows: int) -> int:
    """The first column that is not as described above, -1 if all are."""
    for column in range(len(indptr) - 1):
        last = -1
        for p in range(indptr[column], indptr[column + 1]):
            if not (last < indices[p] < num_rows and 0.0 <= data[p] < np.inf):
                return column
            last = indices[p]
    return -1


@compiled
def _first_from(indices: np.ndarray, start: int, end: int, row: int) -> int:
    """The first place from `start` on whose row is `row` or a later one, `end` without one: steps that double."""
    # Double the steps until the next one would go too far: the place is often near, since blocks are small.
    step = 1
    while start + step < end and indices[start + step] < row:
        start += step
        step *= 2
    # It is within the last step: halve that.
    end = min(end, start + step)
    while start < end:
        middle = (start + end) // 2
        if indices[middle] < row:
            start = middle + 1
        else:
            end = middle
    return start


@compiled
def _number_above(sums: np.ndarray, score: float) -> int:
    """A plain loop over one array, which the compiler turns into vector instructions."""
    number = 0
    for place in range(len(sums)):  # indexed: over the values themselves the compiler does not see through
        if sums[place] > score:
            number += 1
    return number


@compiled
def _through_all(sums: np.ndarray, run_rows: int, first: int, scores: np.ndarray, rows: np.ndarray, size: int) -> int:
    """Keep the best of a block whose first row is `first`. Most runs of rows have no sum above the worst hit so far."""
    worst = scores[0] if size == len(scores) else np.float32(0.0)
    for start in range(0, len(sums), run_rows):
        run = sums[start : start + run_rows]
        if _number_above(run, worst) == 0:
            continue
        for place in range(len(run)):
            if run[place] > worst:  # of equal ones the first stays
                size = _keep_best(scores, rows, size, run[place], first + start + place)
                worst = scores[0] if size == len(scores) else np.float32(0.0)
    return size


@compiled
def search_columns(
    data: np.ndarray,
    indices: np.ndarray,
    indptr: np.ndarray,
    num_rows: int,
    columns: np.ndarray,
    bounds: np.ndarray,
    sums: np.ndarray,
    run_rows: int,
    scores: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Write the best hits of Q queries by (score descending, row ascending), only those with a score above 0.

    Query q consists of `columns[bounds[q]:bounds[q + 1]]` (int64, repeats count). `sums` is float32 [rows of a block],
    all 0 before and after; `run_rows`: see `_through_all`. Out: `scores` float32 and `rows` int64 [Q, k], k >= 1, valid
    up to `counts` int64 [Q].
    """
    for query in range(len(counts)):
        asked = columns[bounds[query] : bounds[query + 1]]
        best, best_rows, size = scores[query], rows[query], 0
        starts, ends = indptr[asked], indptr[asked]
        for first in range(0, num_rows, len(sums)):
            # Add up the weights of the block's rows, column after column; each column goes on where it stopped.
            stop, added = min(first + len(sums), num_rows), 0
            for i in range(len(asked)):
                starts[i] = ends[i]
                ends[i] = _first_from(indices, ends[i], indptr[asked[i] + 1], stop)
                for p in range(starts[i], ends[i]):
                    sums[indices[p] - first] += data[p]
                added += ends[i] - starts[i]
            # Many weights: look through all sums, which is fast as they lie in a row.
            if added * _SPARSE > stop - first:
                size = _through_all(sums[: stop - first], run_rows, first, best, best_rows, size)
                sums[: stop - first] = 0.0
                continue

            # Few weights: look only at the sums of rows that have one.
            for i in range(len(asked)):
                for p in range(starts[i], ends[i]):
                    place = indices[p] - first
                    if sums[place] > 0.0:
                        size = _keep_best(best, best_rows, size, sums[place], indices[p])
                    sums[place] = 0.0  # also keeps a row of several columns from being a hit twice
        # Turn the heap into a list, best first: the worst of what is left goes to the end.
        for end in range(size - 1, 0, -1):
            _swap(best, best_rows, 0, end)
            _sift_down(best, best_rows, end)
        counts[query] = size
