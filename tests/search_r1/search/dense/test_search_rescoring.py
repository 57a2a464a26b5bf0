"""The second scoring of an exact search, where a float32 product tells first which rows matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from search_r1.search.dense.rescoring import BestRows
from search_r1.search.dense.vectors import VectorFile

ROWS = 64


def _cancelling_rows(dim: int, seed: int) -> np.ndarray:
    """Sums of a small part of each row's values: the others cancel exactly, in float64, in any order."""
    rng = np.random.default_rng(seed)
    large = rng.integers(1, 2**20, (ROWS, dim // 4)).astype(float)
    rows = np.concatenate([large, -large, rng.random((ROWS, dim - 2 * (dim // 4)))], axis=1)
    return rng.permuted(rows, axis=1).astype(np.float32)


@pytest.mark.parametrize("dim", [8, 64, 768])
@pytest.mark.parametrize("k", [1, 5])
def test_what_a_float32_product_loses_is_allowed_for(dim: int, k: int, tmp_path: Path) -> None:
    """Its errors are as large as the scores lie apart. The second half of the rows meets the first's k-th."""
    wrong = 0
    for seed in range(50):
        rows = _cancelling_rows(dim, seed)
        exact = rows.astype(np.float64).sum(axis=1)
        wrong += (rows @ np.ones(dim, np.float32)).argmax() != exact.argmax()
        rows.tofile(tmp_path / "vectors")
        longest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
        best = BestRows(np.ones((1, dim), np.float32), k, VectorFile(tmp_path / "vectors", ROWS, dim), longest)
        for part in np.split(np.arange(ROWS), 2):
            best.add(part, np.zeros(len(part), dtype=np.int64))
        assert [hit.row for hit in best.hits()[0]] == np.argsort(-exact.astype(np.float32), kind="stable")[:k].tolist()
    assert wrong, "the float32 product alone was right every time"
