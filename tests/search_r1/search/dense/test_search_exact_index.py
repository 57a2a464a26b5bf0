"""Exact matrix search against brute force in float64: order, ties, batches, wrong files, each term of its bounds."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from search_r1.errors import IndexMismatchError
from search_r1.search.dense.embeddings import VectorFile
from search_r1.search.dense.exact_index import BestRows, ExactIndex
from search_r1.search.dense.faiss_index import flat_vectors
from search_r1.search.retriever import Hit


def _file(folder: Path, vectors: np.ndarray) -> VectorFile:
    path = folder / "vectors.memmap"
    vectors.astype(np.float32).tofile(path)
    return VectorFile(path, *vectors.shape)


def _exact(vectors: np.ndarray, query: np.ndarray, k: int) -> list[Hit]:
    scores = (vectors.astype(np.float64) @ query.astype(np.float64)).astype(np.float32)
    order = np.lexsort((np.arange(len(vectors)), -scores))[:k]
    return [Hit(int(row), float(scores[row])) for row in order]


def _crowded(rows: int, dim: int, seed: int = 0, scale: float = 0.02) -> np.ndarray:
    """Unit vectors in a narrow cone, as those of e5: all scores are close, far closer than bfloat16 can tell."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal(dim) + scale * rng.standard_normal((rows, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(2000, 1), (2000, 3), (2000, 20), (1999, 3), (33, 3), (5, 9), (70, 100)])
def test_the_best_rows_are_those_of_float64(tmp_path: Path, rows: int, k: int, dtype: torch.dtype) -> None:
    vectors = _crowded(rows, 48)
    queries = _crowded(12, 48, seed=0, scale=0.05)
    found = ExactIndex(_file(tmp_path, vectors), dtype=dtype).search(queries, k)
    assert found == [_exact(vectors, query, k) for query in queries]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_vectors_of_any_length(tmp_path: Path, scale: float) -> None:
    rng = np.random.default_rng(1)
    lengths = rng.uniform(0.1, 5.0, (3000, 1))
    vectors = (scale * lengths * rng.standard_normal((3000, 200))).astype(np.float32)
    queries = (rng.standard_normal((7, 200)) - 0.5).astype(np.float32)
    queries[3] = 0.0
    found = ExactIndex(_file(tmp_path, vectors)).search(queries, 4)
    for query, hits in zip(queries, found, strict=True):
        expected = _exact(vectors, query, 4)
        assert [hit.row for hit in hits] == [hit.row for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], rel=1e-6)
    assert [hit.row for hit in found[3]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "num_devices"), [(2000, 3), (2000, 8), (65, 2), (5, 8), (1, 2)])
@pytest.mark.parametrize("max_scores", [400, None])
def test_rows_shared_out_over_devices_give_the_same_answer(
    tmp_path: Path, rows: int, num_devices: int, max_scores: int | None
) -> None:
    """Several times the CPU in place of several GPUs: each has its own rows, and nothing is held twice."""
    vectors, queries = _crowded(rows, 48), _crowded(40, 48, scale=0.05)
    devices = ["cpu"] * num_devices
    index = ExactIndex(_file(tmp_path, vectors), devices, max_scores=max_scores, num_threads=2)
    assert sum(len(part.matrix_RD) for part in index._parts) == rows == len(index)
    assert max(len(part.matrix_RD) for part in index._parts) == -(-rows // num_devices)
    assert index.search(queries, 7) == [_exact(vectors, query, 7) for query in queries]


def test_all_devices_work_before_the_first_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    for name in ("_coarse", "_candidates"):
        real = getattr(ExactIndex, name)
        monkeypatch.setattr(
            ExactIndex, name, lambda *arguments, n=name, real=real: (order.append(n), real(*arguments))[1]
        )
    ExactIndex(_file(tmp_path, _crowded(300, 16)), ["cpu"] * 3).search(_crowded(4, 16), 2)
    assert order == ["_coarse"] * 3 + ["_candidates"] * 3


def test_scores_that_are_all_negative(tmp_path: Path) -> None:
    vectors = _crowded(500, 32)
    queries = -_crowded(5, 32, scale=0.05)
    found = ExactIndex(_file(tmp_path, vectors)).search(queries, 5)
    assert found == [_exact(vectors, query, 5) for query in queries]


def test_scores_that_cancel_out(tmp_path: Path) -> None:
    """Long vectors at right angles to the query but for a hair: bfloat16 sees noise, only the bound on it helps."""
    rng = np.random.default_rng(2)
    query = rng.standard_normal(48)
    vectors = rng.standard_normal((3000, 48))
    vectors -= np.outer(vectors @ query / (query @ query), query)
    vectors += np.outer(rng.uniform(0.0, 1e-4, 3000), query)
    vectors, query = vectors.astype(np.float32), query.astype(np.float32)
    (hits,) = ExactIndex(_file(tmp_path, vectors)).search(query[None], 3)
    assert [hit.row for hit in hits] == [hit.row for hit in _exact(vectors, query, 3)]


def test_small_chunks_many_queries_and_threads_change_nothing(tmp_path: Path) -> None:
    vectors, queries = _crowded(1500, 40), _crowded(300, 40, scale=0.05)
    file = _file(tmp_path, vectors)
    whole = ExactIndex(file).search(queries, 6)
    for max_scores in (1, 20_000, 100_000):
        for num_threads in (1, 3):
            assert ExactIndex(file, max_scores=max_scores, num_threads=num_threads).search(queries, 6) == whole
    assert whole == [_exact(vectors, query, 6) for query in queries]


def test_a_result_is_the_same_alone_and_in_any_batch(tmp_path: Path) -> None:
    """Bit for bit: rows and scores."""
    index = ExactIndex(_file(tmp_path, _crowded(4000, 96)))
    queries = _crowded(257, 96, scale=0.05)
    together = index.search(queries, 3)
    alone = [index.search(query[None], 3)[0] for query in queries[:40]]
    assert together[:40] == alone
    assert index.search(queries[::-1], 3)[::-1] == together
    assert [hits[:1] for hits in together] == index.search(queries, 1)


def test_equal_scores_come_in_row_order(tmp_path: Path) -> None:
    few = _crowded(4, 32)
    vectors = np.concatenate([few] * 300)[np.random.default_rng(3).permutation(1200)]
    found = ExactIndex(_file(tmp_path, vectors), max_scores=20_000).search(few, 10)
    for query, hits in zip(few, found, strict=True):
        copies = np.flatnonzero((vectors == query).all(1))[:10]
        assert [hit.row for hit in hits] == copies.tolist()
        assert len({hit.score for hit in hits}) == 1


def test_rows_and_queries_may_be_none(tmp_path: Path) -> None:
    index = ExactIndex(_file(tmp_path, _crowded(5, 8)))
    assert index.search(np.empty((0, 8), dtype=np.float32), 3) == []
    assert index.search(_crowded(2, 8), 0) == [[], []]


def test_a_flat_index_of_faiss_is_read_in_place(tmp_path: Path) -> None:
    vectors = _crowded(300, 24)
    index = faiss.IndexFlatIP(24)
    index.add(vectors)
    faiss.write_index(index, str(tmp_path / "e5_Flat.index"))
    found = flat_vectors(tmp_path / "e5_Flat.index")
    assert found is not None and (len(found), found.dim) == (300, 24)
    np.testing.assert_array_equal(found.block(0, 300), vectors)
    np.testing.assert_array_equal(found.take(np.array([299, 0, 7])), vectors[[299, 0, 7]])
    np.testing.assert_array_equal(np.concatenate([block for _, block in found.blocks(77)]), vectors)
    faiss.write_index(faiss.IndexFlatL2(24), str(tmp_path / "l2.index"))
    assert flat_vectors(tmp_path / "l2.index") is None


def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    for value in (np.nan, np.inf):
        vectors = _crowded(40, 8)
        vectors[17, 3] = value
        with pytest.raises(IndexMismatchError, match="row 17 has NaN or Inf"):
            ExactIndex(_file(tmp_path, vectors))


def test_a_file_of_another_size_is_refused_and_one_cut_short_is_an_error(tmp_path: Path) -> None:
    file = _file(tmp_path, _crowded(10, 8))
    with pytest.raises(IndexMismatchError, match="320 bytes, not the 352 of 11 float32 vectors of 8"):
        VectorFile(file.path, 11, 8)
    index = ExactIndex(file)
    with file.path.open("r+b") as opened:
        opened.truncate(16)
    with pytest.raises(IndexMismatchError, match="cut short"):
        index.search(_crowded(1, 8), 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits(tmp_path: Path) -> None:
    vectors, queries = _crowded(4000, 96), _crowded(100, 96, scale=0.05)
    file = _file(tmp_path, vectors)
    assert ExactIndex(file, devices=["cuda"]).search(queries, 5) == ExactIndex(file).search(queries, 5)


# --- what the bounds allow for: bfloat16 at the first scoring, a float32 product at the second
#
# In every case of bfloat16 the best row looks worse than another one after rounding, by nearly as much as the bound
# allows. A bound without the term, or with a smaller one, loses it. Each row comes with its negative, so that the mean,
# which is taken off before rounding, is exactly zero.


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
    index = ExactIndex(_file(folder, vectors), dtype=torch.bfloat16)
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
    # in pieces of the matrix, so that the best so far count as well
    index = ExactIndex(_file(tmp_path, vectors), dtype=torch.bfloat16, max_scores=50_000)
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
    index = ExactIndex(_file(tmp_path, vectors), dtype=torch.bfloat16, num_threads=2)
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
    file = _file(tmp_path, vectors)
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
        longest = float(np.linalg.norm(rows.astype(np.float64), axis=1).max())
        best = BestRows(np.ones((1, dim), np.float32), k, _file(tmp_path, rows), longest)
        for part in np.split(np.arange(ROWS), 2):
            best.add(part, np.zeros(len(part), dtype=np.int64))
        assert [hit.row for hit in best.hits()[0]] == np.argsort(-exact.astype(np.float32), kind="stable")[:k].tolist()
    assert wrong, "the float32 product alone was right every time"
