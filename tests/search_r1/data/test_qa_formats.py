"""Each set as its authors publish it: which text is the question, which are the answers, and what is refused."""

from __future__ import annotations

import errno
import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from search_r1.data.qa.records import _BLOCK
from search_r1.data.qa.source_files import BadRows, read_questions
from verl.errors import DataError

HOTPOT = {
    "_id": "5a8b57f25542995d1e6f1371",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Scott Derrickson", 0], ["Ed Wood", 0]],
    "context": [["Ed Wood", ["Edward Davis Wood Jr. was an American filmmaker.", " He ..."]]],
}
TWO_WIKI = {
    "_id": "8813f87c0bdd11eba7f7acde48001122",
    "type": "compositional",
    "question": "Who is the mother of the director of film Polish-Russian War (Film)?",
    "context": [["Xawery Zulawski", ["..."]]],
    "supporting_facts": [["Xawery Zulawski", 2]],
    "evidences": [["Polish-Russian War", "director", "Xawery Zulawski"]],
    "answer": "Małgorzata Braunek",
}
MUSIQUE = {
    "id": "2hop__153573_109006",
    "paragraphs": [{"idx": 0, "title": "Lyon", "paragraph_text": "...", "is_supporting": False}],
    "question": "Who voices the character in Spongebob who is named after the ice cream?",
    "question_decomposition": [{"id": 1, "question": "x", "answer": "y", "paragraph_support_idx": 0}],
    "answer": "Tom Kenny",
    "answer_aliases": ["Thomas James Kenny"],
    "answerable": True,
}
TRIVIA = {
    "Answer": {
        "Aliases": ["Sinclair Lewis", "(Harry) Sinclair Lewis"],
        "NormalizedAliases": ["sinclair lewis"],
        "NormalizedValue": "sinclair lewis",
        "Type": "WikipediaEntity",
        "Value": "Sinclair Lewis",
    },
    "EntityPages": [],
    "Question": "Which American-born Sinclair won the Nobel Prize for Literature in 1930?",
    "QuestionId": "tc_1",
    "QuestionSource": "http://www.triviacountry.com/",
    "SearchResults": [{"DocSource": "Search", "Filename": "1/1_1.txt"}],
}
STRATEGY = {
    "qid": "4fd64bb6ce5b78ab20b6",
    "term": "Albany, New York",
    "description": "Capital of New York",
    "question": "Will the Albany in Georgia reach a hundred thousand occupants before the one in New York?",
    "answer": False,
    "facts": ["..."],
}
POPQA = (
    "id\tsubj\tprop\tobj\tpossible_answers\tquestion\n"
    '4222362\tGeorge Rankin\toccupation\tpolitician\t"[""politician"", ""political leader"", ""pol""]"\t'
    "What is George Rankin's occupation?\n"
)
WHO = "Who was president of the United States in the year that Citibank was founded?"
BAMBOOGLE = (
    f"Question,Answer\r\n{WHO},James Madison\r\n"
    '"When was the composer of ""Carol of the Bells"" born?","December 13, 1877"\r\n'
)


def read(path: Path, split: str = "test", skip: bool = False) -> list:
    return list(read_questions(path, split, BadRows(skip)))


def saved(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("flashrag.jsonl", '{"id": "x_0", "question": " who ", "golden_answers": ["A"]}', [("x_0", "who?", ["A"])]),
        ("numbers.jsonl", '{"id": 7, "question": "q?", "golden_answers": ["A", ""]}', [("7", "q?", ["A", ""])]),
        ("truth.jsonl", '{"id": "a", "question": "q", "golden_answers": [true]}', [("a", "q?", ["yes"])]),
        (
            "NQ-open.dev.jsonl",
            '{"question": "when was x", "answer": ["14 December 1972 UTC", "December 1972"]}\n'
            '{"question": "who got y ", "answer": ["Röntgen"]}\n',
            [
                ("test_0", "when was x?", ["14 December 1972 UTC", "December 1972"]),
                ("test_1", "who got y?", ["Röntgen"]),
            ],
        ),
        ("hotpot.json", json.dumps([HOTPOT]), [(HOTPOT["_id"], HOTPOT["question"], ["yes"])]),
        ("dev.json.gz", json.dumps([TWO_WIKI]), [(TWO_WIKI["_id"], TWO_WIKI["question"], ["Małgorzata Braunek"])]),
        (
            "musique.jsonl",
            json.dumps(MUSIQUE),
            [(MUSIQUE["id"], MUSIQUE["question"], ["Tom Kenny", "Thomas James Kenny"])],
        ),
        (
            "trivia.json",
            json.dumps({"Data": [TRIVIA], "Domain": "Web", "Version": 1.0}, indent=4),
            [("tc_1", TRIVIA["Question"], ["Sinclair Lewis", "(Harry) Sinclair Lewis"])],
        ),
        ("strategy.json", json.dumps([STRATEGY]), [(STRATEGY["qid"], STRATEGY["question"], ["no"])]),
        (
            "popQA.tsv",
            POPQA,
            [("4222362", "What is George Rankin's occupation?", ["politician", "political leader", "pol"])],
        ),
        (
            "bamboogle.csv",
            "\ufeff" + BAMBOOGLE,
            [
                ("test_0", WHO, ["James Madison"]),
                ("test_1", 'When was the composer of "Carol of the Bells" born?', ["December 13, 1877"]),
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_set_as_its_authors_publish_it(tmp_path: Path, name: str, text: str, expected: list) -> None:
    rows = read(saved(tmp_path / name, text))
    assert [(row.id, row.question, row.golden_answers) for row in rows] == expected
    assert [row.index for row in rows] == list(range(len(expected)))


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (HOTPOT, ["type", "level", "supporting_facts", "context"]),
        (MUSIQUE, ["paragraphs", "question_decomposition"]),
        (STRATEGY, ["term", "description", "facts"]),
    ],
)
def test_metadata_is_the_rest_of_the_row(tmp_path: Path, row: dict, keys: list[str]) -> None:
    [found] = read(saved(tmp_path / "x.jsonl", json.dumps(row)))
    assert json.loads(found.metadata) == {key: row[key] for key in keys}


def test_metadata_of_a_flashrag_row_and_of_one_without(tmp_path: Path) -> None:
    rows = [
        {"question": "a", "golden_answers": ["b"], "metadata": {"title": "Łódź"}},
        {"question": "a", "golden_answers": ["b"]},
    ]
    first, second = read(saved(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows))))
    assert (first.metadata, second.metadata) == ('{"title": "Łódź"}', None)


BAD_LINES = [
    ('{"id": "x", "golden_answers": ["b"]}', "it has no question"),
    ('{"id": "x", "question": "a"}', "it has no golden_answers"),
    ('{"id": "x", "question": "  ", "golden_answers": ["b"]}', "the question is '  ', not a text"),
    ('{"id": "x", "question": 3, "golden_answers": ["b"]}', "the question is 3, not a text"),
    ('{"id": "x", "question": "a", "golden_answers": []}', "there is no gold answer"),
    ('{"id": "x", "question": "a", "golden_answers": [" "]}', "there is no gold answer"),
    ('{"id": "x", "question": "a", "golden_answers": {"b": 1}}', r"the gold answers are \[\{'b': 1\}\], not a list"),
    ('{"id": "x", "question": "a", "golden_answers": null}', r"the gold answers are \[None\], not a list"),
    ('{"id": "x", "question": "a", "golden_answers": ["b", 4.5]}', r"the gold answers are \['b', 4.5\]"),
    ('{"id": "x", "question": "a", "golden_answers": ["b"], "metadata": "m"}', "metadata is the text 'm', not"),
    ('{"id": "x", "question": "a", "golden_answers": ["b"], "metadata": "[]"}', "metadata is a list, not an object"),
    ('{"id": true, "question": "a", "golden_answers": ["b"]}', "the id is True"),
    ('{"id": "one", "question": "a", "golden_answers": ["b"]}', "the id 'one' stands already in line 1"),
    ('{"id": "x", "question": "\\ud800", "golden_answers": ["b"]}', "surrogates not allowed"),
    ('{"id": "x", "question": "a", "golden_', "no JSON"),
    ('["a"]', "a JSON list, not an object"),
    ("", "a blank line"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_row_names_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    good = '{"id": "%s", "question": "q", "golden_answers": ["b"]}'
    path = saved(tmp_path / "x.jsonl", "\n".join([good % "one", line, good % "two"]) + "\n")
    with pytest.raises(DataError, match=rf"x\.jsonl:2: .*{reason}.*--skip_bad_rows"):
        read(path)
    bad = BadRows(skip=True)
    assert [(row.id, row.index) for row in read_questions(path, "test", bad)] == [("one", 0), ("two", 2)]
    assert len(bad.listed) == 1 and re.search(rf"^{path}:2: .*{reason}", bad.listed[0])


def test_a_bad_first_row_does_not_hide_the_format(tmp_path: Path) -> None:
    lines = ["{", '{"id": "x", "question": "a"}', '{"id": "y", "question": "a", "golden_answers": ["b"]}']
    path = saved(tmp_path / "x.jsonl", "\n".join(lines))
    assert [row.id for row in read(path, skip=True)] == ["y"]
    with pytest.raises(DataError, match=r"x\.jsonl:1: no JSON"):
        read(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.jsonl",
            '{"id": 1, "input": "a"}',
            r"x\.jsonl:1: a row with the keys id, input; .*known formats .*flashrag",
        ),
        ("x.jsonl", "", "x.jsonl is empty"),
        ("x.json", "[]", "x.json has no rows"),
        ("x.json", '[\n{"_id": "a", "question": "b", "answer": "c"},\n{"_id": ]', r"x\.json:3: no JSON array of rows"),
        ("x.json", '[{"_id": "a", "question": "b", "answer": "c"}', r"x\.json:1: no JSON array of rows: expecting ','"),
        (
            "x.json",
            '[{"_id": "a", "question": "b", "answer": "c"}]\n[]',
            r"x\.json:2: .* more follows the end .*one array",
        ),
        ("x.json", '{"Data": []}\n{"Data": []}', r"x\.json:2: .* more follows .*on each line is named .jsonl"),
        ("x.json", '{"train": [],\n"test": []}', r"x\.json:2: .*'test' has an array, which would not be read"),
        ("x.json", '{"meta": {}, "Data": []}', r"x\.json:1: .*'meta' has an object, which would not be read"),
        ("x.json", '{"question": "b", "answer": "c"}', r"x\.json:1: .* the object has no array"),
        ("x.json", '{"Data": [], "Version": 1.0', r"x\.json:1: .* expecting '}'"),
        ("x.json", "[\n" + "[" * 100_000, r"x\.json:2: no JSON array of rows: maximum recursion depth"),
        ("x.json", f'[\n{{"id": {"9" * 5000}}}]', r"x\.json:2: no JSON array of rows: Exceeds the limit"),
        ("x.json", '"text"', r"x\.json:1: no JSON array of rows: expecting '\['"),
        ("x.csv", "Question,Answer\na,b\nc\n", r"x\.csv:3: it has not as many columns"),
        ("x.csv", "Question,Answer\na,b,c\n", r"x\.csv:2: it has not as many columns"),
        ("x.csv", 'Question,Answer\na,b\nc,"d\n', r"x\.csv:3: a quotation mark begins a cell and none ends it"),
        ("x.csv", 'Question,Answer\n"a" x,b\n', r"x\.csv:2: a quoted cell ends in the middle"),
        ("x.csv", "Question,Answer,Answer\na,b,c\n", r"x\.csv:1: several columns have the name 'Answer'; rename"),
        ("x.csv", 'Question,"Answer\na,b\n', r"x\.csv:1: the names of the columns cannot be read: a quotation mark"),
        ("x.tsv", 'Question\tAnswer\n"a\tb\tc\n', r"x\.tsv:2: it has not as many columns as the first line: 3"),
        ("x.tsv", "id\tquestion\tpossible_answers\n1\ta\t[x]\n", r"x\.tsv:2: possible_answers is no JSON list"),
        ("x.xlsx", "PK", "is none of .jsonl, .json, .csv, .tsv, .parquet"),
        ("x.parquet", "PAR1", "x.parquet cannot be read as parquet"),
        ("x.json", json.dumps([{"_id": "t", "question": "b", "context": []}]), r"x\.json:1: there is no gold answer"),
        ("x.json", json.dumps([STRATEGY | {"answer": "no"}]), "answer is 'no', not true or false"),
        ("x.jsonl", json.dumps(MUSIQUE | {"answerable": False}), r"x\.jsonl:1: the question is marked unanswerable"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(saved(tmp_path / name, text))


def test_a_table_that_is_not_utf8_says_how_to_convert_it(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes("Question,Answer\nWho wrote Émile?,Rousseau\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"x\.csv:2: not UTF-8: byte 26 of the file.*iconv"):
        read(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "x.parquet"])
def test_a_file_that_may_not_be_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    path = saved(tmp_path / name, "[]")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"{name} cannot be read.* [pP]ermission"):
        read(path)


def test_a_date_that_python_does_not_have(tmp_path: Path) -> None:
    days = pa.array([0, 10**9], pa.date32())
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["c", "d"], "on": days}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: a value after row 0 cannot be read: .*write dates and times as"):
        read(tmp_path / "x.parquet")


def test_a_packed_file_that_was_cut_off(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps([HOTPOT | {"_id": str(i)} for i in range(2000)]).encode())
    path = tmp_path / "x.json.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="fetch the file again"):
        read(path)


def test_plain_values_around_the_array_and_across_blocks(tmp_path: Path) -> None:
    """A number that the end of a block cuts is read whole."""
    head, tail = '{"Version": 1.5, "Data": [' + json.dumps(HOTPOT), '], "Domain": null, "Size": 12.5e1}\n '
    for cut in range(1, 7):
        spaces = " " * (_BLOCK - len(head) - tail.index("12.5e1") - cut)
        [found] = read(saved(tmp_path / "x.json", head + spaces + tail))
        assert found.id == HOTPOT["_id"]


def test_an_array_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    """Rows lie across the blocks, one is longer than two blocks, and lines are still counted."""
    rows = [HOTPOT | {"_id": str(i), "context": "é" * (3000 if i != 500 else 3 * _BLOCK)} for i in range(1000)]
    path = saved(tmp_path / "x.json", "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    found = read(path)
    assert [row.id for row in found] == [str(i) for i in range(1000)]
    assert len(json.loads(found[500].metadata)["context"]) == 3 * _BLOCK
    rows[700]["question"] = ""
    path = saved(path, "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    with pytest.raises(DataError, match=r"x\.json:702: the question"):
        read(path)
