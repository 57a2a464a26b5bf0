"""BM25 in memory: sparse lexical search, the embedded default.

score(q, d) = sum over the terms t of q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / average length)),
idf(t) = log(1 + (N - n_t + 0.5) / (n_t + 0.5)): Robertson and Zaragoza 2009 in Lucene's form. The weight of every
(term, row) is kept in a sparse matrix by column, in the files of bm25s, which is validated when it is read; a query
adds up its columns.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

import bm25s
import numpy as np

from search_r1.errors import IndexMismatchError
from search_r1.search.bm25.analyzer import ANALYZER, terms
from search_r1.search.bm25.build import build_index
from search_r1.search.bm25.kernel import BLOCK_ROWS, RUN_ROWS, first_bad_column, search_columns
from search_r1.search.corpus import Corpus
from search_r1.search.manifest import check_folder, check_manifest, read_manifest, replace_folder, umask, write_manifest
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


logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
_MANIFEST = "manifest.json"
_SAMPLED_ROWS = 64


class Bm25Retriever:
    """BM25 with k1 = 0.9 and b = 0.4, the Anserini defaults that the published runs used."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25, corpus_digest: str, num_threads: int = 1) -> None:
        """Search with up to `num_threads` threads. Raises `ValueError` if the arrays of `index` are inconsistent."""
        self._index = index
        self._corpus_digest = corpus_digest
        data, indices, indptr, num_rows = (index.scores[key] for key in ("data", "indices", "indptr", "num_docs"))
        self._postings = Postings(data, indices, indptr, num_rows, num_threads)
        self._columns = _checked_columns(index.vocab_dict, len(indptr) - 1)
        self.fingerprint = f"bm25 {ANALYZER} k1={index.k1} b={index.b} corpus={corpus_digest}"

    @classmethod
    def build(cls, corpus: Corpus, k1: float = 0.9, b: float = 0.4, num_threads: int = 1) -> Bm25Retriever:
        """Index every row of `corpus`. Raises `CorpusError` for a malformed row or if no row has a term."""
        return cls(build_index(corpus, k1, b), corpus.digest, num_threads)

    @classmethod
    def load(cls, folder: str | Path, corpus: Corpus, num_threads: int = 1) -> Bm25Retriever:
        """Open a folder written by `save`. Raises `IndexMismatchError` if it is missing, or of another corpus or
        analyzer."""
        folder = Path(folder)
        found = read_manifest(folder / _MANIFEST)
        if found is None:
            raise IndexMismatchError(
                f"{folder} is not a BM25 index of this service (no {_MANIFEST}); build one: "
                "python -m search_r1.search.index_builder --retrieval_method bm25 --corpus_path ... --save_dir ..."
            )
        _check_analyzer(folder, found, corpus)
        # The manifest must fit the corpus, and the arrays must fit the manifest: either may have been copied alone.
        check_manifest(folder / _MANIFEST, found, _expected(corpus.digest))
        try:
            index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
            loaded = cls(index, corpus.digest, num_threads)
            loaded._check_rows(corpus)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexMismatchError(f"BM25 index {folder} is not readable: {error}; build it again") from error
        own = {"k1": index.k1, "b": index.b, "num_rows": len(loaded)}
        check_manifest(folder / _MANIFEST, found, {key: value for key, value in own.items() if key in found})
        return loaded

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raise `TargetTakenError` if `save` would refuse `folder` because something else is in it."""
        check_folder(folder, _MANIFEST)

    def save(self, folder: str | Path) -> None:
        """Write the index folder, replacing an earlier index only when the new one is complete.

        Raises `TargetTakenError` if `folder` has something else in it.
        """
        folder = Path(folder).resolve()  # through a link: the index lies where it points to
        self.check_folder(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Everything, the manifest too, is written beside the target first: an error leaves the earlier index as it was.
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            self._index.save(staging, show_progress=False)
            parameters = {"k1": self._index.k1, "b": self._index.b, "num_rows": len(self)}
            write_manifest(staging / _MANIFEST, _expected(self._corpus_digest) | parameters)
            # `mkdtemp` makes a folder for this user only; the index gets the permissions of any new folder.
            staging.chmod(0o777 & ~umask())
            replace_folder(staging, folder, _MANIFEST)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def __len__(self) -> int:
        return self._postings.num_rows

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`. Only rows that share a term with the query (score > 0) are hits."""
        known = self._columns
        columns = [[known[term] for term in terms(query) if term in known] for query in queries]
        return self._postings.search(columns, k)

    def _check_rows(self, corpus: Corpus) -> None:
        """Raise `ValueError` unless a sample of rows of `corpus` is in the columns of its terms, and their number fits.

        The files may be of several indexes, each of which is consistent.
        """
        if len(self) != len(corpus):
            raise ValueError(f"it has {len(self)} rows, and the corpus {len(corpus)}")
        for row in np.unique(np.linspace(0, len(corpus) - 1, _SAMPLED_ROWS).astype(np.int64)).tolist():
            for term in terms(corpus[row]["contents"]):
                if term not in self._columns or not self._postings.has(self._columns[term], row):
                    raise ValueError(f"row {row} is not in the column of its term {term!r}")


def _check_analyzer(folder: Path, found: dict[str, Any], corpus: Corpus) -> None:
    """Raise `IndexMismatchError` with the command that builds the index again if its terms are of another analyzer."""
    if found.get("retriever") != "bm25" or found.get("analyzer") == ANALYZER:
        return
    # The command has the parameters of the old index, so that the new one differs from it by the analyzer only.
    command = (
        ".venv/bin/python -m search_r1.search.index_builder --retrieval_method bm25 "
        f"--corpus_path {quote(str(corpus.path))} --save_dir {quote(str(folder.parent))}"
    )
    for option in ("k1", "b"):
        if option in found:
            command += f" --bm25_{option} {found[option]}"
    moved = "" if folder.name == "bm25" else f"; it writes {folder.parent / 'bm25'}, the --index_path from then on"
    raise IndexMismatchError(
        f"{folder / _MANIFEST}: the index has the terms of analyzer {found.get('analyzer')!r}, and queries now have "
        f"those of {ANALYZER!r}; build it again: {command}{moved}"
    )


def _checked_columns(vocabulary: dict[str, int], num_columns: int) -> dict[str, int]:
    """Term to column. Raises `ValueError` when a column is not in the matrix, or that of two terms."""
    if vocabulary.get("", 0) >= num_columns:
        vocabulary = {term: column for term, column in vocabulary.items() if term}  # bm25s adds "" without a column
    if vocabulary and not 0 <= min(vocabulary.values()) <= max(vocabulary.values()) < num_columns:
        raise ValueError(f"a term's column is outside [0, {num_columns})")
    if len(set(vocabulary.values())) != num_columns or len(vocabulary) != num_columns:
        raise ValueError(f"{len(vocabulary)} terms do not have the {num_columns} columns for themselves, one each")
    return vocabulary


def _expected(corpus_digest: str) -> dict[str, str | int]:
    return {"format": 1, "retriever": "bm25", "analyzer": ANALYZER, "corpus": corpus_digest}
