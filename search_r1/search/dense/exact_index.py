"""Exact inner-product search as a matrix product.

The product runs in bfloat16 over a copy of the vectors: half the bytes of float32 and several times the speed. Every
row that could be among the best k, by a proven bound, is then scored again from its float32 values. The copy holds y =
x - m, where m is the mean of a sample of the rows: the vectors of an encoder such as e5 lie close together, all scores
are about q.m, and rounding x would lose more than rows differ. q.x and q.y order the rows alike. With q the query, x a
row, ~ for rounded to bfloat16, c the coarse score, u its rounding (2^-8 where the result of the product is bfloat16), e
the rounding of a sum of d float32 products, and f that of a float32 score:

    |c - q.y| <= a + u |c|,   a = |q - q~| max|y| + |q~| max|y - y~| + e |q| max|y| + f |q| max|x|     (Cauchy-Schwarz)

If k rows have c >= t, the k-th best exact score s (less q.m) is at least t - u |t| - a, and a row of the best k has a
coarse score of at least (s - a) - u |s - a|. So the result is that of float32 vectors and float64 sums, whatever the
batch. The first two terms of a, and u, are attained by some vectors, which the tests include; e and f are worst cases
of float32 sums, far above the errors seen in practice, and small compared with the others.

In that second scoring each row's score is summed on its own, in a fixed order: the same bits whatever else is scored.
If many rows have to be scored, a float32 product with a bounded error first selects those that matter.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

from long_task import track
from search_r1.errors import ServerError
from search_r1.search.dense.embeddings import BLOCK_ROWS, VectorFile
from search_r1.search.dense.encoding.encoder import WorkerThreads
from search_r1.search.dense.encoding.model import cpu_has_bfloat16
from search_r1.search.retriever import Hit

_LOG = logging.getLogger(__name__)

_ROWS = 4096  # read and scored at once
_SCREEN_FROM = 1 / 32  # share of (row, query) pairs from which one product is cheaper than their sums


class BestRows:
    """The best k rows of each query so far, by (score descending, row ascending).

    Legend: B queries, R rows of a block, D = dim; N, P pairs of a row and a query; F pairs found.
    """

    def __init__(self, queries_BD: np.ndarray, k: int, vectors: VectorFile, max_norm: float) -> None:
        """`queries_BD` is float32; no row of `vectors` is longer than `max_norm`."""
        self._k, self._vectors = k, vectors
        self._exact_BD = queries_BD.astype(np.float64)
        self._queries_DB = torch.from_numpy(np.ascontiguousarray(queries_BD.T))
        # of a float32 sum of products in any order, and of the float32 score that it is compared with
        self._error_B = (vectors.dim + 8) * 2.0**-23 * np.linalg.norm(self._exact_BD, axis=1) * max_norm
        self._queries_F, self._rows_F = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        self._scores_F = np.empty(0, dtype=np.float32)

    @property
    def kth_B(self) -> np.ndarray:
        """The lowest of the k scores, float32 [B]; -inf while there are fewer than k."""
        ends_B = np.cumsum(np.bincount(self._queries_F, minlength=len(self._exact_BD)))
        counts_B = np.diff(ends_B, prepend=0)
        kth_B = np.full(len(ends_B), -np.inf, dtype=np.float32)
        full_B = counts_B == self._k
        kth_B[full_B] = self._scores_F[ends_B[full_B] - 1]
        return kth_B

    def add(self, rows_N: np.ndarray, queries_N: np.ndarray) -> None:
        """Score these pairs, each of which must be added only once. Every row is read once."""
        # Pairs of one row next to each other, so that it is read once.
        order = np.argsort(rows_N, kind="stable")
        rows_N, queries_N = rows_N[order], queries_N[order]
        unique, first_of = np.unique(rows_N, return_index=True)
        starts = np.append(first_of, len(rows_N))
        for start in range(0, len(unique), _ROWS):
            rows_R = unique[start : start + _ROWS]
            pairs = slice(starts[start], starts[start + len(rows_R)])
            places_P = np.searchsorted(rows_R, rows_N[pairs])
            self._add_block(self._vectors.take(rows_R), rows_R, places_P, queries_N[pairs])

    def hits(self) -> list[list[Hit]]:
        """One list per query, best first."""
        ends = np.cumsum(np.bincount(self._queries_F, minlength=len(self._exact_BD)))[:-1]
        pairs = zip(np.split(self._rows_F, ends), np.split(self._scores_F, ends), strict=True)
        return [list(map(Hit, rows.tolist(), scores.tolist())) for rows, scores in pairs]

    def _add_block(self, block_RD: np.ndarray, rows_R: np.ndarray, places_P: np.ndarray, queries_P: np.ndarray) -> None:
        if len(places_P) > _SCREEN_FROM * len(rows_R) * len(self._exact_BD):
            kept = self._screen(block_RD, places_P, queries_P)
            places_P, queries_P = places_P[kept], queries_P[kept]
        for start in range(0, len(places_P), _ROWS):
            places, queries = places_P[start : start + _ROWS], queries_P[start : start + _ROWS]
            products = block_RD[places] * self._exact_BD[queries]  # float64
            self._merge(queries, rows_R[places], products.sum(axis=1).astype(np.float32))

    def _screen(self, block_RD: np.ndarray, places_P: np.ndarray, queries_P: np.ndarray) -> np.ndarray:
        """Whether a pair may be among the best k, bool [P]: k rows of the block are at least as good as its k-th best.

        The product may be wrong about the block's k-th row and about the row itself, each by the bound. No sum is seen
        to come near it: one of the two would do, and only the worst case asks for both.
        """
        scores_RB = torch.mm(torch.from_numpy(block_RD), self._queries_DB)
        floor_B = self.kth_B.astype(np.float64)
        if len(block_RD) >= self._k:
            floor_B = np.maximum(floor_B, scores_RB.topk(self._k, dim=0).values[-1].numpy() - self._error_B)
        return scores_RB.numpy()[places_P, queries_P] >= (floor_B - self._error_B)[queries_P]

    def _merge(self, queries_P: np.ndarray, rows_P: np.ndarray, scores_P: np.ndarray) -> None:
        queries = np.concatenate([self._queries_F, queries_P])
        rows = np.concatenate([self._rows_F, rows_P])
        scores = np.concatenate([self._scores_F, scores_P])
        # Sort by query, then best first, and keep the first k of each query.
        order = np.lexsort((rows, -scores, queries))
        first_B = np.searchsorted(queries[order], np.arange(len(self._exact_BD)))
        rank = np.arange(len(order)) - first_B[queries[order]]
        order = order[rank < self._k]
        self._queries_F, self._rows_F, self._scores_F = queries[order], rows[order], scores[order]


_GROUP = 32  # rows whose maximum is looked at first: 32 times fewer values to search for the best k
_QUERIES = 256
_QUERIES_A_THREAD = 32  # fewer share the matrix by the threads inside the product
_CPU_SCORES, _GPU_SCORES = 1 << 23, 1 << 28  # coarse scores held at once; 16 MiB on a CPU
_SAMPLED_BLOCKS, _SAMPLED_ROWS = 16, 4096  # for the mean


@dataclass(frozen=True)
class DeviceRows:
    """The rows from `start` on that one device holds."""

    start: int
    matrix_RD: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.matrix_RD.device


class ExactIndex:
    """All vectors in bfloat16, their rows split over devices; their float32 values stay in the file.

    A row of the best k is among the best k of its device, so each device is searched separately.

    Legend: B queries, R rows, G groups of J rows, D = dim; M, N lists of candidates.
    """

    def __init__(
        self,
        vectors: VectorFile,
        devices: Sequence[str] = ("cpu",),
        dtype: torch.dtype | None = None,
        max_scores: int | None = None,
        num_threads: int = 1,
    ) -> None:
        """Read all vectors once. `dtype` defaults to bfloat16, or to float32 on a CPU without it.

        `max_scores` bounds the memory of a search: the coarse scores (2 bytes each, 4 on a GPU) held at once on a
        device, on a CPU per thread. Raises `IndexMismatchError` for a vector with NaN or Inf, and `ServerError` if a
        device cannot hold its rows.
        """
        # What depends on the devices: the number format and its rounding, and how much fits at once.
        self.dim = vectors.dim
        self._vectors = vectors
        places = [torch.device(device) for device in devices]
        on_gpu = places[0].type == "cuda"
        self._dtype = dtype or (torch.bfloat16 if on_gpu or cpu_has_bfloat16() else torch.float32)
        self._max_scores = max_scores or (_GPU_SCORES if on_gpu else _CPU_SCORES)
        self._output_error = 2.0**-8 if self._dtype == torch.bfloat16 and not on_gpu else 2.0**-23
        self._threads = WorkerThreads(1 if on_gpu else num_threads)
        # memory of their own: fresh pages for every product would take as long as the product
        num_scores = 0 if on_gpu else self._max_scores + _GROUP * _QUERIES
        self._scores = [
            [torch.empty(num_scores, dtype=self._dtype) for _ in places] for _ in range(self._threads.number)
        ]
        # The vectors less their mean, and the largest norms, from which the bound follows.
        self._center_D = _sample_mean(vectors)
        self._max_norm = self._max_offset = self._max_error = 0.0  # of x, y and y - y~
        self._parts = self._load(places)

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries_BD: np.ndarray, k: int) -> list[list[Hit]]:
        """See `Retriever.search`; queries are finite float32 [B, D], the score is the inner product."""
        k = min(k, len(self))
        if k < 1:
            return [[] for _ in queries_BD]
        hits: list[list[Hit]] = []
        for start in range(0, len(queries_BD), _QUERIES):
            # The queries of a batch are shared among the threads, each of which has its own memory for coarse scores.
            batch_BD = queries_BD[start : start + _QUERIES]
            parts = np.array_split(batch_BD, max(1, min(self._threads.number, len(batch_BD) // _QUERIES_A_THREAD)))
            for found in self._threads.map(
                lambda part: self._search(*part, k), list(zip(parts, self._scores, strict=False))
            ):
                hits += found
        return hits

    def _load(self, places: Sequence[torch.device]) -> list[DeviceRows]:
        # Memory for all parts first, so that a device that is too small is known before the vectors are read.
        size = max(1, -(-len(self) // len(places)))
        starts = range(0, max(1, len(self)), size)
        parts = [
            DeviceRows(start, self._room(min(size, len(self) - start), place))
            for start, place in zip(starts, places, strict=False)  # there may be fewer rows than devices
        ]
        # One pass over the file: the norms of the bound, and the rounded rows to the devices that hold them.
        blocks = self._vectors.blocks()
        for start, block in track(blocks, "matrix", -(-len(self) // BLOCK_ROWS), "blocks"):
            norms_R = torch.linalg.vector_norm(torch.from_numpy(block), dim=1)
            self._vectors.check_finite(start, norms_R.numpy())
            self._max_norm = max(self._max_norm, float(norms_R.max()))
            offset_RD = torch.from_numpy(block - self._center_D)
            rounded_RD = offset_RD.to(self._dtype)
            error_RD = offset_RD - rounded_RD.float()
            self._max_offset = max(self._max_offset, _largest_norm(offset_RD))
            self._max_error = max(self._max_error, _largest_norm(error_RD))
            for part in parts:
                first, last = max(start, part.start), min(start + len(block), part.start + len(part.matrix_RD))
                if first < last:
                    part.matrix_RD[first - part.start : last - part.start] = rounded_RD[first - start : last - start]
        return parts

    def _room(self, rows: int, device: torch.device) -> torch.Tensor:
        try:
            return torch.empty((rows, self.dim), dtype=self._dtype, device=device)
        except RuntimeError as error:
            needed = rows * self.dim * self._dtype.itemsize / 2**30
            raise ServerError(
                f"{rows} of {len(self)} vectors of {self.dim} values need {needed:.1f} GiB on {device}, more than "
                "is free; give the server more GPUs or use a compressed FAISS index (docs/retrieval.md)"
            ) from error

    def _search(self, queries_BD: np.ndarray, scores: list[torch.Tensor], k: int) -> list[list[Hit]]:
        """`scores` is memory for the coarse scores of each device on a CPU."""
        # The queries exact and rounded, and by how much a coarse score may be wrong for each.
        exact_BD = torch.from_numpy(np.array(queries_BD, dtype=np.float32, order="C"))
        rounded_BD = exact_BD.to(self._dtype)
        slack_B = self._slack(exact_BD, rounded_BD).numpy()
        queries = [rounded_BD.to(part.device).T for part in self._parts]
        common_B = exact_BD.double().numpy() @ self._center_D.astype(np.float64)
        # Slice by slice: coarse scores on all devices, then exact scores of the rows that may be among the best.
        best = BestRows(exact_BD.numpy(), k, self._vectors, self._max_norm)
        size = max(_GROUP, self._max_scores // len(exact_BD) // _GROUP * _GROUP)
        for start in range(0, len(self._parts[0].matrix_RD), size):
            coarse = [  # of all devices before the first is waited for
                (part.start + start, self._coarse(part.matrix_RD[start : start + size], queries_DB, memory))
                for part, queries_DB, memory in zip(self._parts, queries, scores, strict=False)
                if start < len(part.matrix_RD)
            ]
            for first, groups_GJB in coarse:
                floor_B = (best.kth_B - common_B).astype(np.float32)
                rows_N, queries_N = self._candidates(groups_GJB, floor_B, slack_B, k)
                best.add(rows_N + first, queries_N)
        return best.hits()

    def _slack(self, exact_BD: torch.Tensor, rounded_BD: torch.Tensor) -> torch.Tensor:
        """`a` of the module's docstring, float32 [B]."""
        rounded_BD = rounded_BD.float()
        query_B = torch.linalg.vector_norm(exact_BD - rounded_BD, dim=1) * self._max_offset
        row_B = torch.linalg.vector_norm(rounded_BD, dim=1) * self._max_error
        sums = (self.dim + 8) * 2.0**-22 * self._max_offset + 2.0**-21 * self._max_norm
        return query_B + row_B + sums * torch.linalg.vector_norm(exact_BD, dim=1)

    def _coarse(self, matrix_RD: torch.Tensor, queries_DB: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Coarse scores in groups of rows [G, _GROUP, B]; the rows that fill up the last group score -inf."""
        rows, batch = len(matrix_RD), queries_DB.shape[1]
        missing = -rows % _GROUP
        if matrix_RD.is_cuda:
            scores_RB = torch.mm(matrix_RD, queries_DB, out_dtype=torch.float32)
            scores_RB = pad(scores_RB, (0, 0, 0, missing), value=float("-inf"))
        else:
            scores_RB = scores[: (rows + missing) * batch].view(-1, batch)
            # in this order: the other one repacks the whole matrix every time
            torch.mm(matrix_RD, queries_DB, out=scores_RB[:rows])
            scores_RB[rows:] = float("-inf")
        return scores_RB.view(-1, _GROUP, batch)

    def _candidates(
        self, groups_GJB: torch.Tensor, floor_B: np.ndarray, slack_B: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Every (row, query) whose row may be among the query's best k, in no order.

        `floor_B`: the exact score of the k-th best so far, less q.m; -inf when there are fewer.
        """
        # The least score that the k-th best row can have, from the best so far and from the groups' maxima.
        maxima_GB = groups_GJB.amax(1).float()
        if len(maxima_GB) >= k:  # k groups have a row at least as good as the k-th best maximum
            kth_B = maxima_GB.T.contiguous().topk(k, dim=1).values[:, -1].cpu().numpy()
            floor_B = np.maximum(floor_B, kth_B - self._output_error * np.abs(kth_B) - slack_B)
        # All rows whose coarse score allows that much: first the groups that have one, then the rows in them.
        lowest_B = floor_B - slack_B
        threshold_B = torch.from_numpy(lowest_B - self._output_error * np.abs(lowest_B)).to(groups_GJB.device)
        group_M, query_M = torch.nonzero(maxima_GB >= threshold_B, as_tuple=True)
        scores_MJ = groups_GJB[group_M, :, query_M].float()
        wanted_MJ = (scores_MJ >= threshold_B[query_M, None]) & torch.isfinite(scores_MJ)
        member_N, place_N = torch.nonzero(wanted_MJ, as_tuple=True)
        rows_N = (group_M[member_N] * _GROUP + place_N).cpu().numpy()
        return rows_N, query_M[member_N].cpu().numpy()


def _sample_mean(vectors: VectorFile) -> np.ndarray:
    """float32 [D], of up to 65,536 rows, spread over the file; any value is right, the nearest to all is the best."""
    starts = np.unique(np.linspace(0, max(0, len(vectors) - _SAMPLED_ROWS), _SAMPLED_BLOCKS).astype(np.int64))
    total_D, count = np.zeros(vectors.dim), 0
    for start in starts.tolist():
        block_RD = vectors.block(start, min(start + _SAMPLED_ROWS, len(vectors)))
        total_D += block_RD.sum(axis=0, dtype=np.float64)
        count += len(block_RD)
    mean_D = (total_D / max(1, count)).astype(np.float32)
    return mean_D if np.isfinite(mean_D).all() else np.zeros_like(mean_D)  # the row that is not is reported later


def _largest_norm(rows_RD: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(rows_RD, dim=1).max())
