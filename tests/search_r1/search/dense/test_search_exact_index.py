"""Exact matrix search against brute force in float64: order, ties, bounds, batches, files that are wrong."""

from __future__ import annotations

from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from search_r1.errors import IndexMismatchError
from search_r1.search.dense.exact_index import ExactIndex
from search_r1.search.dense.faiss_index import flat_vectors
from search_r1.search.dense.vectors import VectorFile
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


def test_bfloat16_alone_would_have_been_wrong(tmp_path: Path) -> None:
    """What the second scoring is for: the coarse order differs from the exact one."""
    vectors, queries = _crowded(2000, 48), _crowded(12, 48, scale=0.05)
    coarse = torch.from_numpy(queries).bfloat16() @ torch.from_numpy(vectors).bfloat16().T
    exact = queries.astype(np.float64) @ vectors.astype(np.float64).T
    assert (coarse.float().argsort(dim=1, descending=True)[:, 0].numpy() != exact.argmax(1)).any()


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
