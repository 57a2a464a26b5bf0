"""The second scoring of an exact search: the best rows of each query by float32 vectors and float64 sums.

Each row's score is summed on its own, in a fixed order: the same bits whatever else is scored. If many rows have to be
scored, a float32 product with a bounded error first selects those that matter.
"""

from __future__ import annotations

import numpy as np
import torch

from search_r1.search.dense.vectors import VectorFile
from search_r1.search.retriever import Hit

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
