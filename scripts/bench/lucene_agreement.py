"""Why the best passages of our BM25 and of Lucene's differ, by exchanging one part at a time and counting.

Parts: the terms (tokeniser, accents, stemmer) and the lengths of the passages, which Lucene keeps in one byte each.
What is left when both are Lucene's is rounding and the order of equal scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from search_r1.search.bm25.analyzer import terms, terms_and_length
from search_r1.search.bm25.index import Postings
from search_r1.search.corpus import Corpus
from search_r1.search.retriever import Hit, Retriever

Analyze = Callable[[str], list[str]]

_K1, _B = 0.9, 0.4
_SAME_SCORE = 1e-3  # Lucene's scores come with four decimals, less 1e-6 for each equal one before


class VariantBm25:
    """BM25 as ours computes it, over given terms and lengths."""

    def __init__(self, rows: Sequence[Sequence[str]], lengths: np.ndarray, mean_length: float) -> None:
        """`rows`: the terms of each passage. `lengths`: those that its weights are computed with, int [rows]."""
        self._columns: dict[str, int] = {}
        columns = np.array([self._columns.setdefault(t, len(self._columns)) for row in rows for t in row], np.int64)
        sizes = [len(row) for row in rows]
        pairs, counts = np.unique(columns * len(rows) + np.repeat(np.arange(len(rows)), sizes), return_counts=True)
        column, row = np.divmod(pairs, len(rows))
        num_rows = np.bincount(column, minlength=len(self._columns))
        idf = np.log(1 + (len(rows) - num_rows + 0.5) / (num_rows + 0.5)).astype(np.float32)
        norm = _K1 * ((1 - _B) + _B * lengths / mean_length)
        weights = (idf[column] * (counts / (counts + norm[row]))).astype(np.float32)
        indptr = np.concatenate([[0], np.cumsum(num_rows)])
        self._postings = Postings(weights, row.astype(np.int32), indptr, len(rows))

    def search(self, queries: Sequence[Sequence[str]], k: int) -> list[list[Hit]]:
        """`queries` are lists of terms."""
        return self._postings.search([[self._columns[t] for t in query if t in self._columns] for query in queries], k)


def byte_length(length: int) -> int:
    """The length that Lucene reads back: exact below 40, then four significant bits of what is above 24."""
    rest = max(0, length - 24)
    shift = max(0, rest.bit_length() - 4)
    return min(length, 24) + (rest >> shift << shift)


def compare(corpus: Corpus, questions: Sequence[str], ours: Retriever, lucene: Retriever, k: int) -> dict[str, Any]:
    """Share of questions with equal sets of the best k, for ours and with Lucene's parts; and counts of the causes."""
    analyze = lucene_analyzer()
    wanted = lucene.search(list(questions), k + 1)
    contents = [passage["contents"] for passage in corpus]
    own_rows, own_lengths = zip(*map(terms_and_length, contents), strict=True)
    lucene_rows = [analyze(text) for text in contents]
    lucene_lengths = [len(row) for row in lucene_rows]
    own_queries, lucene_queries = [terms(text) for text in questions], [analyze(text) for text in questions]
    found = {"ours": ours.search(list(questions), k)}
    parts = {
        "ours": (own_rows, own_lengths, own_queries),
        "Lucene's terms": (lucene_rows, lucene_lengths, lucene_queries),
    }
    for name, (rows, lengths, queries) in parts.items():
        exact, lossy = np.array(lengths), np.array([byte_length(length) for length in lengths])
        if name != "ours":
            found[name] = VariantBm25(rows, exact, exact.mean()).search(queries, k)
        found[f"{name}, Lucene's lengths"] = VariantBm25(rows, lossy, exact.mean()).search(queries, k)
    return {
        "k": k,
        "questions": len(questions),
        "equal_sets": {name: equal_sets(hits, wanted, k) for name, hits in found.items()},
        "passages": len(contents),
        "passages_with_other_terms": _num_different(own_rows, lucene_rows),
        "passages_with_rounded_length": sum(len(row) != byte_length(len(row)) for row in lucene_rows),
        "questions_with_other_terms": _num_different(own_queries, lucene_queries),
        "terms_of_questions_only_ours": _only_in(own_queries, lucene_queries),
        "terms_of_questions_only_lucene": _only_in(lucene_queries, own_queries),
        "questions_with_a_tie_at_k": sum(_tie_at(hits, k) for hits in wanted),
    }


def lucene_analyzer() -> Analyze:
    """Text to the terms of pyserini's default analyzer, that of its indexes and queries."""
    from pyserini.analysis import Analyzer, get_lucene_analyzer

    analyzer = Analyzer(get_lucene_analyzer())
    return lambda text: [str(term) for term in analyzer.analyze(text)]


def equal_sets(hits: Sequence[Sequence[Hit]], wanted: Sequence[Sequence[Hit]], k: int) -> dict[str, float]:
    """`exact`: the same rows; `up_to_ties`: or rows that score like Lucene's k-th, which may come in any order."""
    equal = ties = 0
    for mine, theirs in zip(hits, wanted, strict=True):
        rows, their_rows = {hit.row for hit in mine}, {hit.row for hit in theirs[:k]}
        equal += rows == their_rows
        ties += rows == their_rows or _differ_by_ties(mine, theirs, k)
    return {"exact": round(equal / len(hits), 4), "up_to_ties": round(ties / len(hits), 4)}


def _differ_by_ties(mine: Sequence[Hit], theirs: Sequence[Hit], k: int) -> bool:
    """Whether Lucene's k-th and next score are equal and all rows that score higher are in both."""
    if not _tie_at(theirs, k) or len(mine) < k:
        return False
    above = {hit.row for hit in theirs[:k] if hit.score > theirs[k - 1].score + _SAME_SCORE}
    return above <= {hit.row for hit in mine} and math.isclose(mine[-1].score, theirs[k - 1].score, abs_tol=_SAME_SCORE)


def _tie_at(hits: Sequence[Hit], k: int) -> bool:
    return len(hits) > k and hits[k - 1].score - hits[k].score < _SAME_SCORE


def _num_different(one: Sequence[list[str]], other: Sequence[list[str]]) -> int:
    return sum(Counter(a) != Counter(b) for a, b in zip(one, other, strict=True))


def _only_in(one: Sequence[list[str]], other: Sequence[list[str]]) -> dict[str, int]:
    """The most frequent terms that a question has in `one` and not in `other`, with the number of questions."""
    only = Counter(term for a, b in zip(one, other, strict=True) for term in set(a) - set(b))
    return dict(only.most_common(20))
