"""Completion: what is added and what is there already, new ids, rows kept byte for byte, never half a file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from search_corpora import write_rows

from search_r1.data.corpus.command_line import main
from search_r1.data.corpus.gold_completion import complete, read_metadata
from search_r1.errors import CorpusError
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus

LUNE = '{"contents": "\\"Lune\\"\\nThe   Lune is a r\\u0069ver.",  "id": "0"}'
MORN = '{"id": 1, "title": "Morn", "text": "Morn is a city. Its wall is old. It has a port.", "url": "w/1"}'


def _lines(path: Path, *lines: str) -> Path:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two rows in unusual spelling, whose ids are their row numbers."""
    return _lines(tmp_path / "corpus.jsonl", LUNE, MORN)


def _added(path: Path, num_rows: int = 2) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[num_rows:]]


def test_only_missing_passages_are_added_behind_untouched_rows(corpus: Path, tmp_path: Path) -> None:
    gold = write_rows(
        tmp_path / "gold.jsonl",
        {"id": "g1", "contents": "Lune\nlune is the RIVER"},  # the same words
        {"id": "g2", "title": "morn", "text": "Its wall is old."},  # a part of the passage with this title
        {"id": "g3", "title": "Osk", "text": "Its wall is old."},  # that part, of another title
        {"id": "g4", "title": "Morn", "text": "all is old"},  # only inside words
        {"id": "0", "contents": '"Tarsia"\nTarsia\'s capital is \u00d6sk.'},
        {"id": "g6", "contents": "TARSIA\ntarsias capital is \u00f6sk"},  # repeats the row before
        {"contents": "no title"},
    )
    output = tmp_path / "new" / "completed.jsonl"
    assert main(["complete", "--corpus_path", str(corpus), "--add", str(gold), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(corpus.read_bytes())
    assert _added(output) == [
        {"id": "2", "contents": '"Osk"\nIts wall is old.'},
        {"id": "3", "contents": '"Morn"\nall is old'},
        {"id": "4", "contents": '"Tarsia"\nTarsia\'s capital is \u00d6sk.'},
        {"id": "5", "contents": "no title"},
    ]
    assert json.loads((tmp_path / "new" / "completed.jsonl.report.json").read_text()) == {
        "corpus": str(corpus),
        "output": str(output),
        "rows_before": 2,
        "rows_added": 4,
        "sources": [{"file": str(gold), "gold": 7, "repeated": 1, "added": 4, "there": 2}],
        "added": [
            {"id": "2", "file": str(gold), "line": 3, "of": "g3"},
            {"id": "3", "file": str(gold), "line": 4, "of": "g4"},
            {"id": "4", "file": str(gold), "line": 5, "of": "0"},
            {"id": "5", "file": str(gold), "line": 7, "of": ""},
        ],
        "coverage": [],
    }
    assert [hit.row for hit in Bm25Retriever.build(Corpus(output)).search(["capital of Tarsia"], 1)[0]] == [4]


def test_a_passage_without_a_title_is_there_only_as_a_whole(tmp_path: Path) -> None:
    rows = [{"id": "0", "contents": "The Lune is a river."}, {"id": "1", "contents": "Morn is old."}]
    corpus = write_rows(tmp_path / "c.jsonl", *rows)
    gold = write_rows(tmp_path / "gold.jsonl", {"contents": "a river"}, {"contents": "morn is old"})
    complete(corpus, [gold], [], tmp_path / "o.jsonl")
    assert _added(tmp_path / "o.jsonl") == [{"id": "2", "contents": "a river"}]


def test_completing_again_adds_nothing(corpus: Path, tmp_path: Path) -> None:
    gold = write_rows(tmp_path / "gold.jsonl", {"title": "Osk", "text": "Old."}, {"contents": "x y"})
    once, twice = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    assert complete(corpus, [gold], [], once)["rows_added"] == 2
    assert complete(once, [gold], [], twice)["rows_added"] == 0
    assert twice.read_bytes() == once.read_bytes()


@pytest.mark.parametrize(
    ("ids", "new"),
    [
        (["0", "1"], ["2", "3"]),
        (["1", "0"], ["added-0", "added-1"]),
        (["0", "2"], ["added-0", "added-1"]),
        (["00", "1"], ["added-0", "added-1"]),
        (["added-4", "x"], ["added-5", "added-6"]),
        (["added-09", "added-1"], ["added-10", "added-11"]),
        (["added-9x", "xadded-7"], ["added-0", "added-1"]),
    ],
)
def test_new_ids_cannot_clash(tmp_path: Path, ids: list[str], new: list[str]) -> None:
    corpus = write_rows(tmp_path / "c.jsonl", *({"id": name, "contents": f"row {name}"} for name in ids))
    gold = write_rows(tmp_path / "gold.jsonl", {"id": ids[0], "contents": "p"}, {"id": ids[1], "contents": "q"})
    complete(corpus, [gold], [], tmp_path / "o.jsonl")
    assert [row["id"] for row in _added(tmp_path / "o.jsonl")] == new


def test_a_last_line_without_newline_stays_a_row(corpus: Path, tmp_path: Path) -> None:
    corpus.write_bytes(corpus.read_bytes().rstrip(b"\n"))
    gold = write_rows(tmp_path / "gold.jsonl", {"contents": "p"})
    complete(corpus, [gold], [], tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_bytes() == corpus.read_bytes() + b'\n{"id": "2", "contents": "p"}\n'


def test_compressed_in_and_out(corpus: Path, tmp_path: Path) -> None:
    packed, output = tmp_path / "c.jsonl.gz", tmp_path / "o.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    complete(packed, [write_rows(tmp_path / "gold.jsonl", {"contents": "p"})], [], output)
    assert gzip.decompress(output.read_bytes()) == corpus.read_bytes() + b'{"id": "2", "contents": "p"}\n'


COLUMNS = {
    "supporting_facts": {"title": ["B", "A", "B", "Z"], "sent_id": [0, 1, 1, 0]},
    "context": {"title": ["A", "B", "C"], "sentences": [["One.", " Two."], ["Three."], ["Four."]]},
}
CONTENT = {"supporting_facts": COLUMNS["supporting_facts"], "context": {"title": ["A"], "content": [["One.", "Two."]]}}
PAIRS = {"supporting_facts": [["A", 0], ["A", 1]], "context": [["B", ["Three."]], ["A", ["One.", "Two."]]]}
STEP = {"question": "?", "support_paragraph": {"title": "A", "paragraph_text": "One.", "is_supporting": True}}
PARAGRAPHS = [
    {"title": "A", "paragraph_text": "One.", "is_supporting": False},
    {"title": "B", "paragraph_text": "Two.", "is_supporting": True},
]


@pytest.mark.parametrize(
    ("metadata", "contents"),
    [
        (COLUMNS, ['"A"\nOne. Two.', '"B"\nThree.']),
        (CONTENT, ['"A"\nOne. Two.']),
        (PAIRS, ['"A"\nOne. Two.']),
        ({"question_decomposition": [STEP, {"question": "?"}]}, ['"A"\nOne.']),
        ({"paragraphs": PARAGRAPHS}, ['"B"\nTwo.']),
        ({"type": "bridge"}, []),
        ({"context": {"title": [], "sentences": []}, "supporting_facts": {"title": ["A"], "sent_id": [0]}}, []),
    ],
)
def test_gold_paragraphs_in_metadata(tmp_path: Path, metadata: dict, contents: list[str]) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"id": "q7", "metadata": metadata}, {"id": "q8"})
    first, second = read_metadata(path)
    assert [gold.contents for gold in first] == contents and second == []
    assert all((gold.file, gold.line, gold.source_id) == (str(path), 1, "q7") for gold in first)


@pytest.mark.parametrize(
    "metadata",
    [
        "text",
        {"context": {"title": ["A"]}, "supporting_facts": {"title": ["A"], "sent_id": [0]}},
        {"context": {"title": ["A", "B"], "sentences": [["x"]]}, "supporting_facts": [["A", 0]]},
        {"paragraphs": [{"title": "A", "is_supporting": True}]},
        {"question_decomposition": [{"support_paragraph": {"title": "A"}}]},
    ],
)
def test_unreadable_metadata_names_file_and_line(tmp_path: Path, metadata: Any) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"id": "0"}, {"id": "1", "metadata": metadata})
    with pytest.raises(CorpusError, match=r"q\.jsonl, line 2: the gold paragraphs in its metadata cannot be read"):
        list(read_metadata(path))


def test_coverage_before_and_after(corpus: Path, tmp_path: Path) -> None:
    """Covered before: the river. Covered after: Osk too, from its own metadata. The port of the third is nowhere."""
    questions = write_rows(
        tmp_path / "q.jsonl",
        {"question": "a", "golden_answers": ["river"]},
        {"question": "b", "golden_answers": ["Osk"], "metadata": {"paragraphs": [PARAGRAPHS[1] | {"title": "Osk"}]}},
        {"question": "c", "golden_answers": ["Port Royal"]},
        {"question": "d", "golden_answers": ["yes"], "metadata": {"question_decomposition": [STEP]}},
    )
    report = complete(corpus, [], [questions], tmp_path / "o.jsonl")
    assert report["sources"] == [
        {"file": str(questions), "gold": 2, "repeated": 0, "questions_without_gold": 2, "added": 2, "there": 0}
    ]
    counts = {"questions": 4, "yes_no": 1, "empty": 0, "span": 3}
    assert report["coverage"] == [
        {
            "file": str(questions),
            "before": counts | {"covered": 1, "coverage": 0.3333},
            "after": counts | {"covered": 2, "coverage": 0.6667},
        }
    ]
    assert [row["id"] for row in _added(tmp_path / "o.jsonl")] == ["2", "3"]


@pytest.mark.parametrize(
    ("row", "gold", "reason"),
    [
        ('{"id": "2"}', '{"contents": "p"}', r"corpus\.jsonl, line 3: no 'contents'"),
        (LUNE, '{"contents": "the ..."}', r"gold\.jsonl, line 1: the passage has no word"),
        (LUNE, '{"title": "p"}', r"gold\.jsonl, line 1: no 'contents'.*each row must be"),
        (LUNE, '{"contents": 3}', r"gold\.jsonl, line 1: 'contents' is a int"),
    ],
)
def test_a_bad_row_leaves_the_output_as_it_was(corpus: Path, tmp_path: Path, row: str, gold: str, reason: str) -> None:
    corpus.write_text(f"{LUNE}\n{MORN}\n{row}\n")
    output = tmp_path / "o.jsonl"
    output.write_text("as it was")
    before = sorted(tmp_path.iterdir())
    gold_file = _lines(tmp_path / "gold.jsonl", gold)
    with pytest.raises(CorpusError, match=reason):
        complete(corpus, [gold_file], [], output)
    assert output.read_text() == "as it was"
    assert sorted(tmp_path.iterdir()) == sorted([*before, gold_file])


def test_the_corpus_itself_is_not_overwritten(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gold = write_rows(tmp_path / "gold.jsonl", {"contents": "p"})
    before = corpus.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(corpus)
    arguments = ["complete", "--corpus_path", str(corpus), "--add", str(gold)]
    assert main([*arguments, "--output", str(tmp_path / "link.jsonl")]) == 2
    assert "link.jsonl is an input of this command; write to another --output" in capsys.readouterr().err
    assert corpus.read_bytes() == before
    with pytest.raises(SystemExit):
        main(["complete", "--corpus_path", str(corpus), "--output", "o.jsonl"])


def test_the_folder_of_the_report_is_made_before_the_corpus_is_read(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gold = write_rows(tmp_path / "gold.jsonl", {"contents": "p"})
    output, report = tmp_path / "o.jsonl", tmp_path / "new" / "report.json"
    arguments = ["complete", "--corpus_path", str(corpus), "--add", str(gold), "--output", str(output), "--report"]
    assert main([*arguments, str(report)]) == 0 and json.loads(report.read_text())["rows_added"] == 1
    output.unlink()
    for impossible in (gold / "report.json", tmp_path):
        assert main([*arguments, str(impossible)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --report {impossible}")
    assert not output.exists()


def test_real_passages_are_found_in_their_corpus(wiki_mini: Path, tmp_path: Path) -> None:
    """Twenty real passages, ten of them cut, are there; under another title they are not."""
    with wiki_mini.open("rb") as file:
        lines = [next(file) for _ in range(2000)]
    corpus = tmp_path / "part.jsonl"
    corpus.write_bytes(b"".join(lines))
    whole = [json.loads(line)["contents"] for line in lines[100:120]]
    parts = [" ".join(contents.split(" ")[:-5]) for contents in whole[:10]]
    renamed = ['"Elsewhere"\n' + contents.partition("\n")[2] for contents in whole[10:]]
    assert all(contents.partition("\n")[2] for contents in parts)
    rows = [{"contents": contents} for contents in [*parts, *whole[10:], *renamed]]
    report = complete(corpus, [write_rows(tmp_path / "gold.jsonl", *rows)], [], tmp_path / "o.jsonl")
    assert report["sources"][0] | {"file": ""} == {"file": "", "gold": 30, "repeated": 0, "added": 10, "there": 20}
    assert [row["line"] for row in report["added"]] == list(range(21, 31))
