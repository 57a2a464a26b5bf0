"""Questions as tables keep them: lists in cells, quotation marks, long cells."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from search_r1.data.qa.answer_lists import answer_texts
from search_r1.data.qa.formats import QaRow
from search_r1.data.qa.source_files import BadRows, read_questions
from search_r1.rewards.metrics import exact_match
from verl.errors import DataError

LISTS: list[list[Any]] = [
    ["Ulaanbaatar", "Ulan Bator"],
    ["It's", 'the "o" clock', "a 'b' \"c\""],
    ["back\\slash\n", "no\xa0break", "東京"],
    ["one"],
    ["a, b", "c] d", "[e", "(f)"],
    ["['a', 'b']", '["c"]'],
    ["a rather long answer that makes NumPy break its lines"] * 3,
    [1969, 1970],
    [True, False],
]
AS_TEXT = {
    "json": json.dumps,
    "repr": repr,
    "numpy": lambda values: str(np.array(values)),
    "numpy objects": lambda values: str(np.array(values, dtype=object)),
    "numpy repr": lambda values: repr(np.array(values)),
    "numpy scalars": lambda values: repr(list(np.array(values))),
}


def rows(path: Path, skip: bool = False) -> list[QaRow]:
    return list(read_questions(path, "test", BadRows(skip)))


@pytest.mark.parametrize("written", AS_TEXT)
@pytest.mark.parametrize("values", LISTS, ids=str)
def test_a_list_as_text_is_the_list(values: list[Any], written: str) -> None:
    assert answer_texts(AS_TEXT[written](values)) == answer_texts(values)


@pytest.mark.parametrize("key", ["answer", "golden_answers"])
@pytest.mark.parametrize("column", [list, tuple, np.array])
def test_pandas_writes_one_list_in_every_file(column: Any, key: str, tmp_path: Path) -> None:
    values = ["Ulaanbaatar", "Ulan Bator", 'the "red" hero\'s']
    frame = pd.DataFrame({"question": ["capital of Mongolia?"], key: [column(values)]})
    frame.to_csv(tmp_path / "x.csv")
    frame.to_csv(tmp_path / "x.tsv", sep="\t", index=False)
    frame.to_parquet(tmp_path / "x.parquet")
    frame.to_json(tmp_path / "x.jsonl", orient="records", lines=True)
    pd.read_csv(tmp_path / "x.csv").to_json(tmp_path / "again.jsonl", orient="records", lines=True)
    for name in ("x.csv", "x.tsv", "x.parquet", "x.jsonl", "again.jsonl"):
        [row] = rows(tmp_path / name)
        assert row.golden_answers == values, name
        assert exact_match("ulan bator", row.golden_answers)


@pytest.mark.parametrize(
    "text",
    [
        "[Fe/H]",
        "[sic]",
        "[0, 1)",
        "[[Paris]]",
        "[007]",
        '("Heroes")',
        "('Til) Kingdom Come",
        "{}",
        "()",
        "(1, 2)",
        "[a b]",
    ],
)
def test_an_answer_in_brackets_stays_as_it_is(text: str) -> None:
    assert answer_texts(text) == [text]
    assert answer_texts([text, "['a', 'b']"]) == [text, "['a', 'b']"]  # in a list nothing is read as a list


@pytest.mark.parametrize(
    "text",
    [
        "['Ulaanbaatar', 'Ulan B",
        "['a' 'b', 'c']",
        "['a' ... 'z']",
        "[['a', 'b']]",
        "['a', nan]",
        "['a', None]",
        "[1.5]",
        "[b'a']",
        "Index(['a', 'b'], dtype='object')",
        str(pd.array(["a", "b"])),
        str(pd.Series(["a", "b"])),
        str(np.array([f"a{number}" for number in range(2000)])),
    ],
)
def test_half_a_list_is_a_bad_row_with_its_reason(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": text}) + '\n{"question": "r", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:1: the gold answers (begin like a list|are \[)"):
        rows(path)
    assert [row.question for row in rows(path, skip=True)] == ["r?"]


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        ("_id,question,answer", {"_id": "1", "question": "q"}),
        ("Question,Answer", {"Question": "q"}),
        (
            "id,question,paragraphs,answer,answer_aliases",
            {"id": "1", "question": "q", "paragraphs": "p", "answer": "a"},
        ),
    ],
)
def test_published_formats_saved_by_pandas(columns: str, row: dict[str, Any], tmp_path: Path) -> None:
    last = columns.rpartition(",")[2]
    pd.DataFrame([row | {last: ["b", "c"]}]).to_csv(tmp_path / "x.csv", index=False)
    [found] = rows(tmp_path / "x.csv")
    assert found.golden_answers[-2:] == ["b", "c"]


def test_metadata_saved_by_pandas_is_an_object(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "a", "metadata": {"type": "bridge", "who": "it's"}}
    pd.DataFrame([row]).to_csv(tmp_path / "x.csv", index=False)
    [found] = rows(tmp_path / "x.csv")
    assert json.loads(found.metadata or "") == row["metadata"]


# Quotation marks and long cells.


def tsv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["question\tanswer", *lines]) + "\n")
    return path


def test_a_quotation_mark_without_a_partner_merges_no_rows_of_a_tsv(tmp_path: Path) -> None:
    lines = ['"Heroes, by whom?\tBowie', 'in "Help", who?\t"Beatles', 'what?\tthe "B" side"', '"where\tin "A"']
    found = rows(tsv(tmp_path / "x.tsv", *lines))
    assert [[row.question.rstrip("?"), row.golden_answers[0]] for row in found] == [
        line.replace("?", "").split("\t") for line in lines
    ]


def test_a_quoted_title_is_text_in_a_tsv(tmp_path: Path) -> None:
    lines = ['"Heroes" (album), by whom?\tDavid "Ziggy" Bowie', "next?\ta"]
    assert [row.question for row in rows(tsv(tmp_path / "x.tsv", *lines))] == ['"Heroes" (album), by whom?', "next?"]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_table_that_pandas_writes_is_read_as_pandas_reads_it(delimiter: str, tmp_path: Path) -> None:
    """Cells of quotation marks, line ends and delimiters; a tab only in cells of one line, as TSV has them."""
    draw = random.Random(0)
    parts = ['"', '""', "a", "é", " ", ",", "'", "[", "]", "?"]
    cells = [["".join(draw.choices([*parts, more], k=9)) + "x" for more in ("\n", "\t")] for _ in range(300)]
    frame = pd.DataFrame(cells, columns=["question", "answer"])
    for name in frame:
        frame[name] = frame[name].str.replace("[", "(")  # no list
    path = tmp_path / ("x.csv" if delimiter == "," else "x.tsv")
    frame.to_csv(path, sep=delimiter, index=False)
    found = rows(path)
    assert [row.golden_answers[0] for row in found] == frame["answer"].tolist()
    assert [row.question.removesuffix("?") for row in found] == [text.strip() for text in frame["question"]]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_bad_rows_of_a_csv_are_left_out_and_the_others_read(end: str, tmp_path: Path) -> None:
    lines = ["question,answer", '"Heroes" (album),Bowie', "b,c", '"d', "e,f", "g,h,i", '"j, ""k""","l', 'm"', "n,o"]
    path = tmp_path / "x.csv"
    path.write_bytes(end.join([*lines, ""]).encode())
    bad = BadRows(skip=True)
    found = list(read_questions(path, "test", bad))
    assert [row.question for row in found] == ["b?", "e?", 'j, "k"?', "n?"]
    assert found[2].golden_answers == [f"l{end}m"]
    assert [text.split(": ")[0] for text in bad.listed] == [f"{path}:{line}" for line in (2, 4, 6)]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv"])
def test_a_cell_has_any_length(name: str, tmp_path: Path) -> None:
    long, lines = "x" * 200_000, "y\n" * 100_000
    frame = pd.DataFrame({"question": ["q", "r"], "answer": ["a", "b"], "context": [long, lines]})
    frame.to_csv(tmp_path / name, sep="\t" if name.endswith("tsv") else ",", index=False)
    assert [json.loads(row.metadata or "")["context"] for row in rows(tmp_path / name)] == [long, lines]
