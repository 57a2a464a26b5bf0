"""The sparse matrix of a BM25 index: weights of (row, term) by column, validated and searched."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from search_r1.search.bm25.kernel import BLOCK_ROWS, RUN_ROWS, first_bad_column, search_columns
from search_r1.search.retriever import Hit

_WEIGHTS_A_THREAD = 1 << 18  # about half a millisecond of work: less is not worth handing over


class Postings:
    """Weights `data` float32 [nonzero] of rows `indices` int [nonzero]; column c is `indptr[c]` to `indptr[c + 1]`.

    The arrays may be memory-mapped. Searched from one thread at a time.
    """

    def __init__(
        self, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, num_rows: int, num_threads: int = 1
    ) -> None:
        """Raises `ValueError` if the arrays are inconsistent: compiled code does not check bounds."""
        self.data, self.indices = _read_only(data), _read_only(indices)
        self.indptr = _read_only(indptr.astype(np.int64))
        self.num_rows = num_rows
        self._check()
        self._sums = [np.zeros(BLOCK_ROWS, dtype=np.float32) for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="bm25") if num_threads > 1 else None

    def search(self, queries: Sequence[Sequence[int]], k: int) -> list[list[Hit]]:
        """At most `k` hits for each query (a list of columns), by (score descending, row ascending); scores are > 0."""
        k = min(k, self.num_rows)
        if k < 1 or not queries:
            return [[] for _ in queries]
        # The queries in one array, and arrays for their results.
        bounds = np.cumsum([0, *map(len, queries)])
        columns = np.fromiter(chain.from_iterable(queries), dtype=np.int64, count=bounds[-1])
        scores, rows = np.empty((len(queries), k), dtype=np.float32), np.empty((len(queries), k), dtype=np.int64)
        counts = np.empty(len(queries), dtype=np.int64)

        def run(sums: np.ndarray, start: int, stop: int) -> None:
            part, part_bounds = slice(start, stop), bounds[start : stop + 1]
            matrix = (self.data, self.indices, self.indptr, self.num_rows)
            search_columns(*matrix, columns, part_bounds, sums, RUN_ROWS, scores[part], rows[part], counts[part])

        # Several threads only where each has enough to do: the compiled code releases the GIL.
        cuts = self._cuts(columns, bounds) if self._pool else [0, len(queries)]
        if self._pool and len(cuts) > 2:
            list(self._pool.map(run, self._sums, cuts[:-1], cuts[1:]))
        else:
            run(self._sums[0], 0, len(queries))
        found = zip(rows.tolist(), scores.tolist(), counts.tolist(), strict=True)
        return [list(map(Hit, best[:size], values)) for best, values, size in found]

    def has(self, column: int, row: int) -> bool:
        """Whether `column` has a weight for `row`."""
        rows = self.indices[self.indptr[column] : self.indptr[column + 1]]
        place = int(np.searchsorted(rows, row))
        return place < len(rows) and int(rows[place]) == row

    def _cuts(self, columns: np.ndarray, bounds: np.ndarray) -> list[int]:
        """Where to cut the list of queries into parts of about equal work, one a thread: from 0 to their number."""
        work = np.concatenate([[0], np.cumsum(self.indptr[columns + 1] - self.indptr[columns])])[bounds]
        parts = max(1, min(len(self._sums), int(work[-1]) // _WEIGHTS_A_THREAD))
        inner = np.searchsorted(work, np.arange(1, parts) * (work[-1] / parts))
        return [0, *inner.tolist(), len(bounds) - 1]

    def _check(self) -> None:
        if len(self.data) != len(self.indices) or self.indptr[0] != 0 or self.indptr[-1] != len(self.data):
            raise ValueError("its arrays differ in length")
        if np.any(np.diff(self.indptr) < 0):
            raise ValueError("its columns are out of order")
        column = first_bad_column(self.data, self.indices, self.indptr, self.num_rows)
        if column >= 0:
            raise ValueError(
                f"column {column} has a row outside [0, {self.num_rows}), rows out of order, or a weight that is not a "
                "number of 0 or more"
            )


def _read_only(array: np.ndarray) -> np.ndarray:
    """A plain, read-only view: built and memory-mapped arrays are then the same type to the compiler."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
