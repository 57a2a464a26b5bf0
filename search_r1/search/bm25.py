"""BM25 in memory: sparse lexical search, the embedded default.

score(q, d) = sum over the terms t of q of idf(t) * tf(t, d) / (tf(t, d) + k1 * (1 - b + b * |d| / average length)),
idf(t) = log(1 + (N - n_t + 0.5) / (n_t + 0.5)): Robertson and Zaragoza 2009 in Lucene's form. bm25s keeps the weight of
every (term, row) in a sparse matrix; a query adds up its columns.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import bm25s
import numpy as np
from tqdm import tqdm

from search_r1.search.analyzer import ANALYZER, terms
from search_r1.search.corpus import Corpus
from search_r1.search.errors import CorpusError, IndexMismatchError
from search_r1.search.manifest import check_manifest, read_manifest, write_manifest
from search_r1.search.retriever import Hit

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets itself to DEBUG
_MANIFEST = "manifest.json"


class Bm25Retriever:
    """BM25 with k1 = 0.9 and b = 0.4, the values of Anserini that the published runs used."""

    name = "bm25"

    def __init__(self, index: bm25s.BM25, corpus_digest: str) -> None:
        self._index = index
        self._corpus_digest = corpus_digest

    @classmethod
    def build(cls, corpus: Corpus, k1: float = 0.9, b: float = 0.4) -> Bm25Retriever:
        """Index every row of `corpus`. Raises `CorpusError` on a malformed row or when no row has a term."""
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(term, len(vocabulary)) for term in terms(passage["contents"])]
            for passage in tqdm(corpus, total=len(corpus), desc="bm25", disable=None)
        ]
        if not vocabulary:
            raise CorpusError(f"corpus {corpus.path} has no word to index")
        index = bm25s.BM25(k1=k1, b=b, method="lucene")
        index.index((ids, vocabulary), show_progress=False)
        return cls(index, corpus.digest)

    @classmethod
    def load(cls, folder: str | Path, corpus: Corpus) -> Bm25Retriever:
        """Open a folder written by `save`. Raises `IndexMismatchError` when it is missing or of another corpus."""
        folder = Path(folder)
        found = read_manifest(folder / _MANIFEST)
        if found is None:
            raise IndexMismatchError(
                f"{folder} is not a BM25 index of this service (no {_MANIFEST}; Lucene is not read); build one: "
                "python -m search_r1.search.index_builder --retrieval_method bm25 --corpus_path ... --save_dir ..."
            )
        check_manifest(folder / _MANIFEST, found, _expected(corpus.digest))
        try:
            return cls(bm25s.BM25.load(folder, mmap=True, show_progress=False), corpus.digest)
        except (OSError, ValueError, KeyError) as error:
            raise IndexMismatchError(f"BM25 index {folder} is not readable: {error}; build it again") from error

    def save(self, folder: str | Path) -> None:
        """Write the index folder, replacing an earlier one only when the new one is complete."""
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            self._index.save(staging, show_progress=False)
            parameters = {"k1": self._index.k1, "b": self._index.b, "num_rows": len(self)}
            write_manifest(staging / _MANIFEST, _expected(self._corpus_digest) | parameters)
            staging.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def __len__(self) -> int:
        return int(self._index.scores["num_docs"])

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`. Only rows that share a term with the query (score > 0) are hits."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Hit]:
        columns = [self._index.vocab_dict[term] for term in terms(query) if term in self._index.vocab_dict]
        if not columns:
            return []
        scores = self._scores(columns)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > k:
            rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
        best = rows[np.lexsort((rows, -scores[rows]))][:k]
        return [Hit(int(row), float(scores[row])) for row in best]

    def _scores(self, columns: list[int]) -> np.ndarray:
        """Score of every row, float32 [rows]. A row occurs at most once in a column, so `+=` loses nothing."""
        data, indices, indptr = (self._index.scores[key] for key in ("data", "indices", "indptr"))
        scores = np.zeros(len(self), dtype=np.float32)
        for column in columns:
            span = slice(indptr[column], indptr[column + 1])
            scores[indices[span]] += data[span]
        return scores


def _expected(corpus_digest: str) -> dict[str, str | int]:
    return {"format": 1, "retriever": "bm25", "analyzer": ANALYZER, "corpus": corpus_digest}
