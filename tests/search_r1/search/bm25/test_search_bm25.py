"""BM25: the formula, its order, what finds nothing, the saved index, recall on real text."""

from __future__ import annotations

import math
from pathlib import Path

import bm25s
import numpy as np
import pytest
from search_corpora import corpus_of

from search_r1.errors import CorpusError, IndexMismatchError
from search_r1.search.bm25.analyzer import terms
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus


def test_scores_are_the_formula_worked_out_by_hand(tmp_path: Path) -> None:
    # lengths 2, 3, 1 (average 2); "cat" is in two of three rows, "dog" in one
    retriever = Bm25Retriever.build(corpus_of(tmp_path, "cat dog", "cat cat bird", "fish"))
    (hits,) = retriever.search(["cat dog"], 3)

    def weight(tf: int, rows_with_term: int, length: int) -> float:
        idf = math.log(1 + (3 - rows_with_term + 0.5) / (rows_with_term + 0.5))
        return idf * tf / (tf + 0.9 * (1 - 0.4 + 0.4 * length / 2))

    assert [hit.row for hit in hits] == [0, 1]
    assert hits[0].score == pytest.approx(weight(1, 2, 2) + weight(1, 1, 2), rel=1e-6)
    assert hits[1].score == pytest.approx(weight(2, 2, 3), rel=1e-6)


def test_a_repeated_query_term_counts_twice(tmp_path: Path) -> None:
    retriever = Bm25Retriever.build(corpus_of(tmp_path, "cat dog", "fish"))
    once, twice = retriever.search(["cat", "cat cat"], 1)
    assert twice[0].score == pytest.approx(2 * once[0].score)


def test_no_known_term_finds_nothing(corpus_file: Path) -> None:
    retriever = Bm25Retriever.build(Corpus(corpus_file))
    assert retriever.search(["zyxxy", "", "the of and", "?!", "river"], 3)[:4] == [[], [], [], []]


def test_only_rows_that_match_are_hits_and_k_bounds_them(corpus_file: Path) -> None:
    retriever = Bm25Retriever.build(Corpus(corpus_file))
    (all_hits,) = retriever.search(["Tarsia"], 100)
    assert {hit.row for hit in all_hits} == {1, 4} and all(hit.score > 0 for hit in all_hits)
    assert retriever.search(["Tarsia"], 1) == [all_hits[:1]]


def test_accents_possessives_and_inflections_match() -> None:
    assert terms("Beyoncé's rivers") == terms("beyonce river") == terms("BEYONCE\u0301\u2019s River")
    assert terms("The 3 cats, 東京") == ["3", "cat", "東京"]
    assert terms("the U.S. cats' cat's") == ["u", "", "cat", "cat"]  # Porter leaves nothing of "s"


def test_saved_index_gives_the_same_answers(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus(corpus_file)
    built = Bm25Retriever.build(corpus)
    built.save(tmp_path / "indexes" / "bm25")
    built.save(tmp_path / "indexes" / "bm25")  # replaces
    loaded = Bm25Retriever.load(tmp_path / "indexes" / "bm25", corpus)
    queries = ["river of Morn", "country Tarsia", "singer", "nothing known: zyxxy"]
    assert loaded.search(queries, 5) == built.search(queries, 5)
    assert len(loaded) == 5
    assert [path.name for path in (tmp_path / "indexes").iterdir()] == ["bm25"]


def test_an_index_written_by_bm25s_itself_gives_the_same_answers(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus(corpus_file)
    ours = Bm25Retriever.build(corpus)
    ours.save(tmp_path / "bm25")
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(term, len(vocabulary)) for term in terms(row["contents"])] for row in corpus]
    theirs = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    theirs.index((ids, vocabulary), show_progress=False)
    theirs.save(tmp_path / "bm25", show_progress=False)  # its vocabulary ends in "", which has no column
    loaded = Bm25Retriever.load(tmp_path / "bm25", corpus)
    queries = ["river of Morn", "country Tarsia", "s", "the S river"]
    assert loaded.search(queries, 5) == ours.search(queries, 5)
    assert loaded.search(["s"], 5) == [[]] and loaded.fingerprint == ours.fingerprint


def test_fingerprint_tells_what_answers_depend_on(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus(corpus_file)
    prints = [
        Bm25Retriever.build(corpus).fingerprint,
        Bm25Retriever.build(corpus, k1=1.2).fingerprint,
        Bm25Retriever.build(corpus, b=0.75).fingerprint,
        Bm25Retriever.build(corpus_of(tmp_path, "cat", "dog")).fingerprint,
    ]
    assert len(set(prints)) == 4
    assert Bm25Retriever.build(corpus, num_threads=2).fingerprint == prints[0]


def test_a_damaged_index_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    corpus = Corpus(corpus_file)
    Bm25Retriever.build(corpus).save(tmp_path / "bm25")
    vocabulary = tmp_path / "bm25" / "vocab.index.json"
    whole = vocabulary.read_text()
    vocabulary.write_text(whole.replace("}", ', "more": 1000}'))
    with pytest.raises(IndexMismatchError, match="column is outside.*build it again"):
        Bm25Retriever.load(tmp_path / "bm25", corpus)
    vocabulary.write_text(whole)
    rows = tmp_path / "bm25" / "indices.csc.index.npy"
    np.save(rows, np.load(rows) + 1)
    with pytest.raises(IndexMismatchError, match="a row outside.*build it again"):
        Bm25Retriever.load(tmp_path / "bm25", corpus)


def test_index_of_another_corpus_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    Bm25Retriever.build(Corpus(corpus_file)).save(tmp_path / "bm25")
    other = corpus_of(tmp_path, "cat", "dog")
    with pytest.raises(IndexMismatchError, match="corpus: index has"):
        Bm25Retriever.load(tmp_path / "bm25", other)
    with pytest.raises(IndexMismatchError, match="not a BM25 index.*index_builder"):
        Bm25Retriever.load(tmp_path / "nowhere", other)


def test_corpus_without_a_word_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no word to index"):
        Bm25Retriever.build(corpus_of(tmp_path, "?!", "the"))


def test_finds_gold_answers_of_real_questions(wiki_mini: Path, wiki_index: Path, nq_questions: list[dict]) -> None:
    corpus = Corpus(wiki_mini)
    assert len(corpus) == 22_953
    texts = [passage["contents"].lower() for passage in corpus]
    everything = "\n".join(texts)
    asked = [row for row in nq_questions[:250] if any(answer.lower() in everything for answer in row["golden_answers"])]
    found = Bm25Retriever.load(wiki_index, corpus).search([row["question"] for row in asked], 3)
    recalled = sum(
        any(answer.lower() in texts[hit.row] for hit in hits for answer in row["golden_answers"])
        for row, hits in zip(asked, found, strict=True)
    )
    assert len(asked) > 150
    assert recalled / len(asked) > 0.4  # measured 0.485; three random passages: 0.06
