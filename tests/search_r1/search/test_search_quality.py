"""The quality benchmark: recall by hand over a small corpus, real indexes, the parts of the comparison with Lucene."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from search_corpora import write_rows
from search_encoders import encoder

from search_r1.search.bm25.analyzer import terms, terms_and_length
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import EncoderOptions
from search_r1.search.retriever import Hit

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))
from lucene_agreement import VariantBm25, byte_length, equal_sets  # noqa: E402
from retrieval_quality import Indexes, Reranked, measure, table  # noqa: E402

QUESTIONS = [
    ("Where was Anna Velt born?", ["Morn"]),  # BM25: rank 1
    ("Lune Tarsia", ["Osk"]),  # rank 2
    ("Lune", ["Atlantis"]),  # not in the corpus
    ("zyxxy", ["singer"]),  # BM25 finds nothing
    ("Is Morn a city?", ["yes"]),
]
BM25_ALL = {
    "1": {"hits": 1, "of_all": 0.25, "of_covered": 0.3333},
    "3": {"hits": 2, "of_all": 0.5, "of_covered": 0.6667},
    "5": {"hits": 2, "of_all": 0.5, "of_covered": 0.6667},
    "20": {"hits": 2, "of_all": 0.5, "of_covered": 0.6667},
}


@pytest.fixture
def arguments(model_dir: Path, corpus_file: Path, tmp_path: Path) -> argparse.Namespace:
    """Of a run over the five passages, with a small untrained encoder."""
    rows = [{"question": text, "golden_answers": golden} for text, golden in QUESTIONS]
    files = [tmp_path / name / "test.jsonl" for name in ("one", "two")]
    for path, some in zip(files, (rows[:1], rows[1:]), strict=True):
        path.parent.mkdir()
        write_rows(path, *some)
    (tmp_path / "work").mkdir()
    return argparse.Namespace(
        corpus_path=corpus_file,
        questions=files,
        work=tmp_path / "work",
        model=str(model_dir),
        family="minilm",
        reranker=None,
    )


def test_recall_of_real_indexes(arguments: argparse.Namespace) -> None:
    report = measure(arguments)
    assert report["coverage"]["all"] == {
        "questions": 5, "yes_no": 1, "empty": 0, "span": 4, "covered": 3, "coverage": 0.75
    }  # fmt: skip
    systems = report["systems"]
    hits = {name: [found["hits"] for found in row.values()] for name, row in systems["BM25"].items()}
    assert hits == {"one/test.jsonl": [1, 1, 1, 1], "two/test.jsonl": [0, 1, 1, 1], "all": [1, 2, 2, 2]}
    assert systems["BM25"]["all"] == BM25_ALL
    reasons = ("BM25 by Lucene needs", "pyserini could not build the index")
    assert systems["BM25, Lucene"] == systems["BM25"] or systems["BM25, Lucene"]["not_run"].startswith(reasons)
    # five passages: whatever the untrained encoder thinks, the dense index returns all of them among its best 20
    assert systems["dense, minilm"]["all"]["20"] == {"hits": 3, "of_all": 0.75, "of_covered": 1.0}
    assert systems["hybrid (BM25 + dense, RRF)"]["all"]["20"]["hits"] == 3
    assert systems["BM25, best 100 reranked by the bi-encoder"]["all"]["20"] == BM25_ALL["20"]
    lines = list(table(report))
    assert "| all | BM25 | 0.250 (0.333) | 0.500 (0.667) | 0.500 (0.667) | 0.500 (0.667) |" in lines
    json.dumps(report)


def test_without_a_model_the_rows_say_why(arguments: argparse.Namespace) -> None:
    arguments.model = None
    report = measure(arguments)
    assert report["systems"]["dense, minilm"] == {"not_run": "no model folder was given by --model"}
    assert any("| all | dense, minilm | not run: no model folder" in line for line in table(report))


def test_reranking_orders_what_bm25_found_and_nothing_else(arguments: argparse.Namespace) -> None:
    """Against the exact definition: inner products of the encoder's own vectors."""
    indexes, queries = Indexes(arguments), ["river of Morn", "Tarsia city country", "singer", "zyxxy"]
    assert len(indexes.dense) == 5
    path = arguments.work / "minilm_Flat.index"
    options = EncoderOptions("minilm", arguments.model)
    found = Reranked(indexes.bm25, path, options).search(queries, 2)
    model = encoder(Path(arguments.model), "minilm")
    for query, hits in zip(queries, found, strict=True):
        rows = [hit.row for hit in indexes.bm25.search([query], 100)[0]]
        vectors = model.encode_passages([indexes.corpus[row]["contents"] for row in rows])
        scores = vectors @ model.encode_queries([query])[0] if rows else np.empty(0)
        best = np.argsort(-scores)[:2]
        assert [hit.row for hit in hits] == [rows[i] for i in best]
        assert [hit.score for hit in hits] == pytest.approx(scores[best], abs=1e-5)
    assert [len(hits) for hits in found] == [2, 2, 1, 0]


@pytest.mark.parametrize(
    ("length", "kept"),
    [(0, 0), (39, 39), (40, 40), (41, 40), (42, 42), (56, 56), (59, 56), (60, 60), (100, 96), (1000, 984)],
)
def test_lengths_as_lucene_keeps_them(length: int, kept: int) -> None:
    """60 is 24 + 36, and 36 = 9 * 4 has four significant bits; 100 = 24 + 76 becomes 24 + 9 * 8."""
    assert byte_length(length) == kept


def test_our_parts_give_our_scores(corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    rows, counted = zip(*(terms_and_length(passage["contents"]) for passage in corpus), strict=True)
    queries = ["Morn river", "the country of Tarsia", "zyxxy", "Morn Morn"]
    lengths = np.array(counted)
    assert sum(lengths) < sum(map(len, rows))  # a name in Chinese has a term per character
    variant = VariantBm25(rows, lengths, lengths.mean()).search([terms(query) for query in queries], 5)
    for hits, expected in zip(variant, Bm25Retriever.build(corpus).search(queries, 5), strict=True):
        assert [hit.row for hit in hits] == [hit.row for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], rel=1e-6)
    longer = VariantBm25(rows, lengths + 1, lengths.mean()).search([terms("Morn")], 1)[0][0]
    assert longer.score < variant[3][0].score / 2


def test_equal_sets_with_and_without_ties() -> None:
    theirs = [Hit(1, 3.0), Hit(2, 2.0), Hit(3, 1.0), Hit(4, 0.999999)]
    clear = [*theirs[:3], Hit(4, 0.5)]
    cases = [
        ([Hit(2, 3.0), Hit(1, 2.0), Hit(3, 1.0)], clear),  # another order
        ([Hit(1, 3.0), Hit(2, 2.0), Hit(4, 1.0)], theirs),  # a row of the same score as the third
        ([Hit(1, 3.0), Hit(2, 2.0), Hit(4, 1.0)], clear),  # a worse row
        ([Hit(1, 3.0), Hit(5, 2.0), Hit(4, 1.0)], theirs),  # a better row is missing
    ]
    mine, wanted = zip(*cases, strict=True)
    assert equal_sets(mine, wanted, 3) == {"exact": 0.25, "up_to_ties": 0.5}
