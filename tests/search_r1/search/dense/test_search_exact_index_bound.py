"""What the bounds of an exact search allow for: bfloat16 at the first scoring, a float32 product at the second.

In every case of bfloat16 the best row looks worse than another one after rounding, by nearly as much as the bound
allows. A bound without the term, or with a smaller one, loses it. Each row comes with its negative, so that the mean,
which is taken off before rounding, is exactly zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from search_r1.search.dense.exact_index import ExactIndex
from search_r1.search.dense.rescoring import BestRows
from search_r1.search.dense.vectors import VectorFile

ULP = 2.0**-7  # of bfloat16 at 1, where it keeps 8 bits; rounding errs by at most half of it
NEARLY = 0.99
D = 64


def _rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().double().numpy()


def _found(folder: Path, best: np.ndarray, other: np.ndarray, query: np.ndarray) -> int:
    """Row 0 is `best`, row 1 `other`. Checks by float64 that it is, and that bfloat16 alone says the opposite."""
    vectors = np.stack([best, other, -best, -other]).astype(np.float32)
    query = query.astype(np.float32)
    exact = vectors.astype(np.float64) @ query.astype(np.float64)
    coarse = _rounded(_rounded(vectors) @ _rounded(query))
    assert exact.argmax() == 0 and coarse[1] > coarse[0]
    path = folder / "vectors.memmap"
    vectors.tofile(path)
    index = ExactIndex(VectorFile(path, *vectors.shape), dtype=torch.bfloat16)
    (hits,) = index.search(query[None], 1)
    return hits[0].row


def _pattern() -> np.ndarray:
    """Half of it 1, half of it -1."""
    return np.repeat([1.0, -1.0], D // 2)


def test_the_rounding_of_the_product(tmp_path: Path) -> None:
    """Scores on either side of the middle between two bfloat16 numbers: they end a whole unit apart.

    The best row's third value is not a bfloat16 number; what it loses takes the score across the middle.
    """
    lost = 0.75 * 2.0**-4 * ULP / 2
    best = np.array([1.0, ULP / 2 - 2.0**-4, 2.0**-4 + lost, -(2.0**-13)])
    other = np.array([1.0, ULP / 2, 2.0**-15, 0.0])
    assert _found(tmp_path, best, other, np.ones(4)) == 0


def test_the_rounding_of_the_rows(tmp_path: Path) -> None:
    """Every value of the best row is rounded down, every value of the other one up, by nearly half a unit.

    Their positive and negative values nearly cancel, so the rounding of the product is small beside that of the rows.
    """
    down = np.where(_pattern() > 0, 1 + NEARLY * ULP / 2, -(1 + (2 - NEARLY) * ULP / 2))
    loss = D * NEARLY * ULP / 2
    best, other = np.append(down, 0.0), np.append(-down[::-1], 0.0)
    query = np.append(np.ones(D), 1.0)
    assert np.isclose((best - _rounded(best)) @ query, loss) and np.isclose((other - _rounded(other)) @ query, -loss)
    best[-1] = _rounded(np.array([1.02 * (other - best) @ query]))[0]
    assert _found(tmp_path, best, other, query) == 0


def test_the_rounding_of_the_query(tmp_path: Path) -> None:
    """The same with exact rows: one along what the query loses by rounding, one against it."""
    query = np.append(np.where(_pattern() > 0, 1 + NEARLY * ULP / 2, 1 + (2 - NEARLY) * ULP / 2), 1.0)
    best, other = np.append(_pattern(), 0.0), np.append(-_pattern(), 0.0)
    best[-1] = _rounded(np.array([1.02 * (other - best) @ query]))[0]
    assert _found(tmp_path, best, other, query) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0])
def test_no_row_is_lost_wherever_the_vectors_lie(tmp_path: Path, scale: float, offset: float) -> None:
    """Vectors around a common point, whose scores differ by far less than bfloat16 can tell at their size."""
    rng = np.random.default_rng(0)
    vectors = (scale * (offset + 0.05 * rng.standard_normal((6000, D)))).astype(np.float32)
    queries = (offset + 0.05 * rng.standard_normal((70, D))).astype(np.float32)
    path = tmp_path / "vectors.memmap"
    vectors.tofile(path)
    # in pieces of the matrix, so that the best so far count as well
    index = ExactIndex(VectorFile(path, 6000, D), dtype=torch.bfloat16, max_scores=50_000)
    found = index.search(queries, 5)
    scores_BR = (queries.astype(np.float64) @ vectors.astype(np.float64).T).astype(np.float32)
    for scores_R, hits in zip(scores_BR, found, strict=True):
        assert [hit.row for hit in hits] == np.lexsort((np.arange(6000), -scores_R))[:5].tolist()


def test_two_crowds_far_apart(tmp_path: Path) -> None:
    """No one point is near all rows, so many of them are scored again, in blocks and after a product in float32."""
    rng = np.random.default_rng(1)
    common = rng.standard_normal(D)
    vectors = common + 0.02 * rng.standard_normal((20_000, D))
    vectors[::2] *= -1
    vectors[5000:5100] = vectors[1]  # equal scores, some of them in another block
    vectors[19_000:19_050] = vectors[1]
    vectors = vectors.astype(np.float32)
    queries = np.concatenate([vectors[[1, 0]], (common + 0.02 * rng.standard_normal((40, D))).astype(np.float32)])
    path = tmp_path / "vectors.memmap"
    vectors.tofile(path)
    index = ExactIndex(VectorFile(path, *vectors.shape), dtype=torch.bfloat16, num_threads=2)
    found = index.search(queries, 120)
    for query, hits in zip(queries, found, strict=True):
        scores_R = (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1).astype(np.float32)
        best = np.lexsort((np.arange(len(vectors)), -scores_R))[:120]
        assert [hit.row for hit in hits] == best.tolist()
        assert [hit.score for hit in hits] == scores_R[best].tolist()
    assert [index.search(query[None], 120)[0] for query in queries] == found
    assert index.search(queries[::-1], 120)[::-1] == found


def test_rows_are_taken_in_any_order_and_density(tmp_path: Path) -> None:
    vectors = np.random.default_rng(2).standard_normal((3000, 6)).astype(np.float32)
    path = tmp_path / "vectors.memmap"
    vectors.tofile(path)
    file = VectorFile(path, 3000, 6)
    rng = np.random.default_rng(3)
    for size in (0, 1, 7, 400, 2900):
        rows = rng.permutation(3000)[:size]
        np.testing.assert_array_equal(file.take(rows), vectors[rows])
        np.testing.assert_array_equal(file.take(np.sort(rows)), vectors[np.sort(rows)])
    np.testing.assert_array_equal(file.take(np.array([5, 5, 2])), vectors[[5, 5, 2]])


# --- the second scoring, where a float32 product tells first which rows matter


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
