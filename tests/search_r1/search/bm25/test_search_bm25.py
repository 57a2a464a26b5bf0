"""BM25: the formula, what finds nothing, the saved index, recall on real text; the compiled search, bit for bit."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest
from search_corpora import ROWS, corpus_of

from search_r1.errors import CorpusError, IndexMismatchError
from search_r1.search import index_builder
from search_r1.search.bm25 import index
from search_r1.search.bm25 import kernel as bm25_kernel
from search_r1.search.bm25.analyzer import terms
from search_r1.search.bm25.build import build_index
from search_r1.search.bm25.index import Bm25Retriever, Postings
from search_r1.search.corpus import Corpus
from search_r1.search.retriever import Hit


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
    assert terms("The 3 cats, 東京") == ["3", "cat", "東", "京"]
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


def test_an_index_written_by_bm25s_itself_gives_the_same_answers(tmp_path: Path) -> None:
    contents = [row["contents"].replace("東京", "Tokyo") for row in ROWS]  # bm25s has the number of terms as length
    corpus = corpus_of(tmp_path, *contents)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"manifest.json": lambda fields: fields | {"num_rows": 4}}, "num_rows: index has 4, now 5"),
        ({"manifest.json": lambda fields: fields | {"k1": 1.2}}, "k1: index has 1.2, now 0.9"),
        ({"params.index.json": lambda fields: fields | {"b": 0.75}}, "b: index has 0.4, now 0.75"),
        ({"params.index.json": lambda fields: fields | {"num_docs": 6}}, "it has 6 rows, and the corpus 5"),
        ({"vocab.index.json": lambda terms: dict(list(terms.items())[1:])}, "do not have the .* columns"),
        ({"vocab.index.json": lambda terms: dict.fromkeys(terms, 0)}, "do not have the .* columns"),
        ({"vocab.index.json": lambda terms: dict(zip(terms, reversed(terms.values()), strict=True))}, "is not in the"),
        ({"vocab.index.json": lambda terms: list(terms)}, "is not readable"),
    ],
    ids=["rows", "k1", "b", "documents", "missing", "shared", "another order", "list"],
)
def test_files_that_do_not_belong_together_are_refused(
    corpus_file: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    corpus = Corpus(corpus_file)
    Bm25Retriever.build(corpus).save(tmp_path / "bm25")
    for name, changed in change.items():
        file = tmp_path / "bm25" / name
        file.write_text(json.dumps(changed(json.loads(file.read_text()))))
    with pytest.raises(IndexMismatchError, match=message):
        Bm25Retriever.load(tmp_path / "bm25", corpus)


def test_index_of_another_corpus_is_refused(corpus_file: Path, tmp_path: Path) -> None:
    Bm25Retriever.build(Corpus(corpus_file)).save(tmp_path / "bm25")
    other = corpus_of(tmp_path, "cat", "dog")
    with pytest.raises(IndexMismatchError, match="corpus: index has"):
        Bm25Retriever.load(tmp_path / "bm25", other)
    with pytest.raises(IndexMismatchError, match="not a BM25 index.*index_builder"):
        Bm25Retriever.load(tmp_path / "nowhere", other)


@pytest.mark.parametrize(("name", "options"), [("bm25", []), ("my index", ["--bm25_k1", "1.2", "--bm25_b", "0.75"])])
def test_an_index_of_another_analyzer_is_refused_with_the_command_that_builds_it_again(
    corpus_file: Path, tmp_path: Path, name: str, options: list[str]
) -> None:
    corpus, folder = Corpus(corpus_file), tmp_path / "my indexes" / name
    build = ["--retrieval_method", "bm25", "--corpus_path", str(corpus_file), "--save_dir", str(folder.parent)]
    assert index_builder.main([*build, *options]) == 0
    (folder.parent / "bm25").rename(folder)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("english-porter-2", "english-porter-1"))
    with pytest.raises(IndexMismatchError, match="'english-porter-1'.*'english-porter-2'") as refused:
        Bm25Retriever.load(folder, corpus)
    message = str(refused.value)
    assert message.startswith(f"{manifest}: ")
    # the command of the message, as a shell reads it, and the path that it names if that is another
    command, _, written = message.partition("build it again: ")[2].partition("; it writes ")
    program, *arguments = shlex.split(command)[1:]
    assert program == "-m" and arguments.pop(0) == "search_r1.search.index_builder"
    assert index_builder.main(arguments) == 0
    rebuilt = Path(written.partition(",")[0] or folder)
    k1, b = (1.2, 0.75) if options else (0.9, 0.4)
    expected = Bm25Retriever.build(corpus, k1, b)
    assert Bm25Retriever.load(rebuilt, corpus).search(["river of Morn"], 5) == expected.search(["river of Morn"], 5)


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


# --- the compiled search against a plain numpy definition, and its weights against bm25s


_ROWS, _COLUMNS = 400, 30


def _matrix(seed: int, index_type: type = np.int32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random matrix whose weights take few values, so that many scores are equal; some columns are empty."""
    random = np.random.default_rng(seed)
    columns = [np.flatnonzero(random.random(_ROWS) < share) for share in random.random(_COLUMNS) ** 3]
    columns[4] = columns[5] = columns[4][:0]
    indptr = np.cumsum([0, *map(len, columns)])
    data = random.choice(np.array([0.1, 0.3, 0.7, 1.9], dtype=np.float32), indptr[-1])
    return data, np.concatenate(columns).astype(index_type), indptr


def _queries(seed: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[], [4], [5, 4, 5], *(random.integers(0, _COLUMNS, random.integers(1, 9)).tolist() for _ in range(60))]


def _by_numpy(matrix: tuple[np.ndarray, np.ndarray, np.ndarray], columns: list[int], k: int) -> list[Hit]:
    """The definition: float32 sums over all rows in the order of the query, then a full sort."""
    data, indices, indptr = matrix
    scores = np.zeros(_ROWS, dtype=np.float32)
    for column in columns:
        span = slice(indptr[column], indptr[column + 1])
        scores[indices[span]] += data[span]
    rows = np.flatnonzero(scores > 0)
    best = rows[np.lexsort((rows, -scores[rows]))][:k]
    return [Hit(int(row), float(scores[row])) for row in best]


@pytest.mark.parametrize("k", [1, 2, 3, 10, 64, _ROWS, _ROWS + 5])
def test_hits_are_those_of_the_definition_bit_for_bit(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and runs end inside columns and inside the matrix; short queries have few weights in a block."""
    matrix, queries = _matrix(k), _queries(k)
    expected = [_by_numpy(matrix, query, k) for query in queries]
    assert sum(map(len, expected)) > 50  # the queries do find something
    for block, run in itertools.product((7, 64, 300, 1 << 15), (3, 256)):
        monkeypatch.setattr(index, "BLOCK_ROWS", block)
        monkeypatch.setattr(index, "RUN_ROWS", run)
        searched = Postings(*matrix, _ROWS)
        assert searched.search(queries, k) == expected, (block, run)
        assert [searched.search([query], k)[0] for query in queries] == expected, (block, run)  # alone


def test_memory_mapped_and_wide_arrays_are_searched_as_they_are(tmp_path: Path) -> None:
    matrix, queries = _matrix(1, np.int64), _queries(1)
    for name, array in zip("abc", matrix, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = Postings(*(np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "abc"), _ROWS)
    assert mapped.search(queries, 7) == [_by_numpy(matrix, query, 7) for query in queries]


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, queries = _matrix(2), _queries(2)
    monkeypatch.setattr(index, "_WEIGHTS_A_THREAD", 1)
    expected = [_by_numpy(matrix, query, 5) for query in queries]
    for num_threads in (2, 3, 8):
        searched = Postings(*matrix, _ROWS, num_threads)
        for _ in range(5):  # the scratch memory of every thread is clean again
            assert searched.search(queries, 5) == expected
        assert searched.search(queries[3:4], 5) == expected[3:4]
        assert searched.search([[], []], 5) == [[], []]


def test_work_is_cut_into_equal_parts_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    indptr = np.array([0, 1, 7, 8, 9])  # columns of 1, 6, 1 and 1 weights
    rows = np.array([0, 0, 1, 2, 3, 4, 5, 0, 0], np.int32)
    searched = Postings(np.ones(9, np.float32), rows, indptr, 6, num_threads=3)
    columns, bounds = np.array([0, 1, 2, 3]), np.array([0, 1, 2, 3, 4])  # four queries of one column
    assert searched._cuts(columns, bounds) == [0, 4]
    monkeypatch.setattr(index, "_WEIGHTS_A_THREAD", 4)
    assert searched._cuts(columns, bounds) == [0, 2, 4]  # 9 // 4 parts; 4.5 is passed after the second query
    monkeypatch.setattr(index, "_WEIGHTS_A_THREAD", 1)
    assert searched._cuts(columns, bounds) == [0, 2, 2, 4]


def test_weights_are_added_in_the_order_of_the_query() -> None:
    # one row; float32 has no 2^24 + 1, so that sum stays at 2^24
    data = np.array([2**24, 1.0, 1.0], dtype=np.float32)
    searched = Postings(data, np.zeros(3, np.int32), np.arange(4), 1)
    assert searched.search([[0, 1, 2], [1, 2, 0]], 1) == [[Hit(0, 2.0**24)], [Hit(0, 2.0**24 + 2)]]


def test_a_score_that_is_not_above_zero_is_no_hit() -> None:
    data = np.array([0.0, 0.0, 2.0], dtype=np.float32)
    searched = Postings(data, np.arange(3, dtype=np.int32), np.array([0, 3]), 4)
    assert searched.search([[0], [0, 0]], 4) == [[Hit(2, 2.0)], [Hit(2, 4.0)]]


def test_nothing_is_asked_for() -> None:
    searched = Postings(*_matrix(3), _ROWS)
    assert searched.search([], 3) == []
    assert searched.search([[0], []], 0) == [[], []]


@pytest.mark.parametrize(
    ("indices", "indptr", "reason"),
    [
        ([0, 1, 3], [0, 2, 3], "column 1 has a row outside"),
        ([0, -1, 2], [0, 2, 3], "column 0 has a row outside"),
        ([1, 0, 2], [0, 2, 3], "column 0 .* out of order"),
        ([0, 1, 1], [0, 1, 3], "column 1 .* out of order"),
        ([0, 1], [0, 2, 2], "differ in length"),
        ([0, 1, 2], [0, 2, 4], "differ in length"),
        ([0, 1, 2], [1, 2, 3], "differ in length"),
        ([0, 1, 2], [0, 5, 3], "out of order"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(indices: list[int], indptr: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Postings(np.ones(3, np.float32), np.array(indices, np.int32), np.array(indptr), 3)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_weights_that_are_no_scores_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="column 1 .* not a number of 0 or more"):
        Postings(np.array([1.0, weight], np.float32), np.array([0, 0], np.int32), np.array([0, 1, 2]), 1)


def test_weights_are_those_of_bm25s_bit_for_bit(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    texts = [" ".join(random.choice(words, random.integers(1, 40)) if row % 9 else ["the"]) for row in range(300)]
    ours = build_index(corpus_of(tmp_path, *texts), k1=1.3, b=0.6)
    theirs = bm25s.BM25(k1=1.3, b=0.6, method="lucene")
    known = ours.vocab_dict
    theirs.index(([[known[term] for term in terms(text)] for text in texts], dict(known)), show_progress=False)
    assert len(known) == 60 and len(ours.scores["data"]) > 2000
    for key in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(ours.scores[key], theirs.scores[key])
    assert ours.scores["data"].dtype == np.float32 and ours.scores["indices"].dtype == np.int32
    assert ours.scores["num_docs"] == theirs.scores["num_docs"] == 300


def test_compiles_without_a_folder_for_machine_code(tmp_path: Path) -> None:
    shutil.copy(bm25_kernel.__file__, tmp_path / "kernel.py")
    (tmp_path / "__pycache__").write_text("not a folder")
    script = "import kernel; print(kernel._is_worse(1.5, 3, 1.5, 2), kernel._is_worse._cache.cache_path)"
    nowhere = {"XDG_CACHE_HOME": "/dev/null/none", "NUMBA_CACHE_DIR": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | nowhere, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True None\n", done.stderr
