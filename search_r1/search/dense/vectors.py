"""float32 vectors in a file, read by row: an embeddings file, or the vectors inside a FAISS Flat index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from search_r1.errors import IndexMismatchError

BLOCK_ROWS = 65_536
_WINDOW_ROWS = 256
_DENSE = 4  # reading this many times as much at once is cheaper than reading row by row


class VectorFile:
    """`num_rows` x `dim` float32 values, row after row, from byte `offset` of `path` on.

    Rows are read, not memory-mapped: mapped pages would count as memory of this process, and if the file were
    truncated, the process would crash instead of raising an error.
    """

    def __init__(self, path: Path, num_rows: int, dim: int, offset: int = 0) -> None:
        """Raises `IndexMismatchError` if the file has another size, or no rows."""
        if num_rows < 1:
            raise IndexMismatchError(f"{path} has no vectors; build it again from a corpus with passages")
        size = path.stat().st_size if path.is_file() else 0
        expected = offset + num_rows * dim * 4
        if size != expected:
            raise IndexMismatchError(
                f"{path} has {size} bytes, not the {expected} of {num_rows} float32 vectors of {dim} values; "
                "use the corpus and the encoder that it was made with"
            )
        self.path, self.dim = path, dim
        self._num_rows, self._offset = num_rows, offset
        self._file = path.open("rb")

    def __len__(self) -> int:
        return self._num_rows

    def block(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, float32 [stop - start, dim], a copy."""
        vectors = np.empty((stop - start, self.dim), dtype=np.float32)
        self._read(vectors, start)
        return vectors

    def check_finite(self, start: int, norms_R: np.ndarray) -> None:
        """Raise `IndexMismatchError` if one of the rows from `start` on, which have these norms, has NaN or Inf."""
        broken = np.flatnonzero(~np.isfinite(norms_R))
        if len(broken):
            raise IndexMismatchError(
                f"{self.path}: the vector of row {start + broken[0]} has NaN or Inf; build the index again"
            )

    def blocks(self, num_rows: int = BLOCK_ROWS) -> Iterator[tuple[int, np.ndarray]]:
        """All rows in order: (first row, float32 [at most num_rows, dim])."""
        for start in range(0, len(self), num_rows):
            yield start, self.block(start, min(start + num_rows, len(self)))

    def take(self, rows: np.ndarray) -> np.ndarray:
        """float32 [len(rows), dim]. Rows close together are read in one go, others one by one."""
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        vectors = np.empty((len(rows), self.dim), dtype=np.float32)
        starts = np.flatnonzero(np.diff(ascending // _WINDOW_ROWS, prepend=-1)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=False):
            self._take_window(ascending[start:stop], vectors[start:stop])
        if (order[1:] > order[:-1]).all():
            return vectors
        as_asked = np.empty_like(vectors)
        as_asked[order] = vectors
        return as_asked

    def _take_window(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Fill `vectors` with ascending `rows`."""
        first, last = int(rows[0]), int(rows[-1])
        if len(rows) * _DENSE >= last + 1 - first:
            vectors[:] = self.block(first, last + 1)[rows - first]
            return
        for place, row in enumerate(rows.tolist()):
            self._read(vectors[place], row)

    def _read(self, vectors: np.ndarray, row: int) -> None:
        """Fill contiguous `vectors` from `row` on."""
        into, position = vectors.data.cast("B"), self._offset + row * self.dim * 4
        while into:
            num_bytes = os.preadv(self._file.fileno(), [into], position)
            if num_bytes == 0:
                raise IndexMismatchError(f"{self.path} was cut short while in use; restore it and start again")
            into, position = into[num_bytes:], position + num_bytes
