"""Corpus to BM25 weights: one pass over the text, then two over its words, in the file format of bm25s."""

from __future__ import annotations

import math
from array import array

import bm25s
import numpy as np

from long_task import track
from search_r1.errors import CorpusError
from search_r1.search.bm25.analyzer import terms_and_length
from search_r1.search.bm25.kernel import compiled
from search_r1.search.corpus import Corpus


def build_index(corpus: Corpus, k1: float, b: float) -> bm25s.BM25:
    """Index every row of `corpus`. Raises `CorpusError` for a malformed row or if no row has a term.

    Takes 4 bytes of memory per term and 8 per (row, term), plus the vocabulary; bm25s' own builder holds Python lists
    of all terms and several copies of the matrix.
    """
    # Words become numbers as they are read, so that the text of the corpus never lies in memory as a whole.
    vocabulary: dict[str, int] = {}
    tokens, sizes, lengths = array("i"), array("i"), array("i")
    for passage in track(corpus, "bm25", len(corpus), "passages"):
        found, length = terms_and_length(passage["contents"])
        tokens.fromlist([vocabulary.setdefault(term, len(vocabulary)) for term in found])
        sizes.append(len(found))
        lengths.append(length)
    if not vocabulary:
        raise CorpusError(f"corpus {corpus.path} has no word to index")
    index = bm25s.BM25(k1=k1, b=b, method="lucene")
    index.vocab_dict, index.nonoccurrence_array = vocabulary, None
    # The part of a weight that depends on the row alone: k1 * (1 - b + b * |d| / average length).
    lengths_R = np.frombuffer(lengths, np.int32)
    norms_R = k1 * ((1 - b) + b * lengths_R / lengths_R.mean())
    index.scores = _weights(np.frombuffer(tokens, np.int32), np.frombuffer(sizes, np.int32), norms_R, len(vocabulary))
    return index


def _weights(tokens: np.ndarray, sizes: np.ndarray, norms: np.ndarray, num_columns: int) -> dict[str, object]:
    """The matrix as bm25s keeps it. Row r has the next `sizes[r]` of `tokens`, its terms' column numbers."""
    counts = _count_rows(tokens, sizes, num_columns)
    indptr = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    data, indices = np.empty(indptr[-1], dtype=np.float32), np.empty(indptr[-1], dtype=np.int32)
    _fill_columns(tokens, sizes, indptr, _idf(counts, len(sizes)), norms, data, indices)
    return {"data": data, "indices": indices, "indptr": indptr, "num_docs": len(sizes)}


def _idf(counts: np.ndarray, num_rows: int) -> np.ndarray:
    """float32 [columns] of log(1 + (N - n + 0.5) / (n + 0.5)), computed in float64."""
    different, inverse = np.unique(counts, return_inverse=True)
    values = [math.log(1 + (num_rows - count + 0.5) / (count + 0.5)) for count in different.tolist()]
    return np.array(values, dtype=np.float32)[inverse]


@compiled
def _count_rows(tokens: np.ndarray, sizes: np.ndarray, num_columns: int) -> np.ndarray:
    """Number of rows of each column, int64 [num_columns]."""
    counts = np.zeros(num_columns, dtype=np.int64)
    last_row = np.full(num_columns, -1, dtype=np.int64)
    start = 0
    for row in range(len(sizes)):
        for column in tokens[start : start + sizes[row]]:
            if last_row[column] != row:
                last_row[column] = row
                counts[column] += 1
        start += sizes[row]
    return counts


@compiled
def _fill_columns(
    tokens: np.ndarray,
    sizes: np.ndarray,
    indptr: np.ndarray,
    idf: np.ndarray,
    norms: np.ndarray,
    data: np.ndarray,
    indices: np.ndarray,
) -> None:
    """Write `data` and `indices` of the matrix: the weight idf[column] * tf / (tf + norms[row]).

    `idf` is float32 [columns], `norms` float64 [rows]; a weight is computed in float64 and rounded once.
    """
    # Count: `data` holds how often a row has a term, in the order of the rows; `ends[c]` is where column c ends so far.
    ends = indptr[:-1].copy()
    start = 0
    for row in range(len(sizes)):
        for column in tokens[start : start + sizes[row]]:
            end = ends[column]
            if end > indptr[column] and indices[end - 1] == row:
                data[end - 1] += 1
            else:
                data[end], indices[end] = 1, row
                ends[column] = end + 1
        start += sizes[row]

    # Weigh: replace the counts, which are complete now.
    for column in range(len(idf)):
        for p in range(indptr[column], indptr[column + 1]):
            data[p] = idf[column] * (data[p] / (norms[indices[p]] + data[p]))
