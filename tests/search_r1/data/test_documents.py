"""`search-r1 data documents`: files of every kind and condition, from a folder to a corpus that is served."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e_world import ENV, ROOT, free_port, wait_until_up
from pdf_files import SCAN, pdf_of

from search_r1.command import programs
from search_r1.data.corpus.command_line import main as corpus_tool
from search_r1.data.documents import corpus_file
from search_r1.data.documents.__main__ import INCOMPLETE, main
from search_r1.search.corpus import Corpus

PAGE = """<!DOCTYPE html><html><head><title>The Lune &amp; its
town</title><style>p {color: red}</style></head><body><nav>Home | Contact</nav>
<h1>The Lune</h1><p>The <b>Lune</b> is a river in Osk.</p><script>let hidden = 1</script>
<table><tr><th>Length</th><td>90 km</td></tr></table></body></html>"""

Make = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my docs"
    made.mkdir()
    return made


@pytest.fixture
def make(folder: Path, tmp_path: Path) -> Make:
    """`make(*arguments)`: the exit status and the rows of the corpus of `folder`."""

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        output = tmp_path / "made" / "corpus.jsonl"
        status = main([str(folder), "--output", str(output), *arguments])
        return status, list(Corpus(output)) if output.is_file() else []

    return run


def texts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["id"]: row["contents"] for row in rows}


def problems(tmp_path: Path) -> dict[str, str]:
    """By file, what the report says is missing."""
    report = json.loads((tmp_path / "made" / "corpus.jsonl.report.json").read_text())
    return {file["file"]: "; ".join(file["problems"]) for file in report["files"] if file["problems"]}


def test_each_kind_of_file_names_its_source(folder: Path, make: Make) -> None:
    (folder / "a.txt").write_text("Plain text.")
    (folder / "b.md").write_text("```\n# no title\n```\n# The guide #\n\nDo this.")
    (folder / "c.HTML").write_text(PAGE)
    (folder / "d.pdf").write_bytes(pdf_of(["First page, by the co-\nast.", "Tides . . . . . . 7"]))
    (folder / "e.csv").write_text('title,text\nOsk,"A town, by a river."\n,No title.\n')
    (folder / "f.json").write_text(
        '[{"text": "One.", "title": null}, {"text": "Two.", "title": "T"}, {"text": "Three.", "title": 0}]'
    )
    (folder / "g.jsonl").write_text('{"title": "Old", "text": "Row."}\n')
    (folder / "h.jsonl").write_text('{"id": "0", "contents": "\\"Of a corpus\\"\\nIts text."}\n')
    (folder / "README").write_text("Without a suffix.")
    status, rows = make()
    assert status == 0
    assert texts(rows) == {
        "README#part=1": '"README"\nWithout a suffix.',
        "a.txt#part=1": '"a.txt"\nPlain text.',
        "b.md#part=1": '"The guide (b.md)"\n```\n# no title\n```\n# The guide #\nDo this.',
        "c.HTML#part=1": '"The Lune & its town (c.HTML)"\nThe Lune\nThe Lune is a river in Osk.\nLength  90 km',
        "d.pdf#page=1&part=1": '"d.pdf, page 1"\nFirst page, by the coast.',
        "d.pdf#page=2&part=1": '"d.pdf, page 2"\nTides ... 7',
        "e.csv#row=1&part=1": '"Osk (e.csv, row 1)"\nA town, by a river.',
        "e.csv#row=2&part=1": '"e.csv, row 2"\nNo title.',
        "f.json#row=1&part=1": '"f.json, row 1"\nOne.',
        "f.json#row=2&part=1": '"T (f.json, row 2)"\nTwo.',
        "f.json#row=3&part=1": '"0 (f.json, row 3)"\nThree.',
        "g.jsonl#row=1&part=1": '"Old (g.jsonl, row 1)"\nRow.',
        "h.jsonl#row=1&part=1": '"Of a corpus (h.jsonl, row 1)"\nIts text.',
    }
    places = {row["id"]: (row["source"], row.get("page"), row.get("row")) for row in rows}
    assert places["d.pdf#page=2&part=1"] == ("d.pdf", 2, None)
    assert places["e.csv#row=1&part=1"] == ("e.csv", None, 1)


def test_what_cannot_be_read_is_listed_and_the_rest_is_read(
    folder: Path, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "good.txt").write_text("Good.")
    (folder / "empty.md").touch()
    (folder / "blank.txt").write_text(" \n\n")
    (folder / "latin.txt").write_bytes("un café".encode("latin-1"))
    (folder / "cut.txt").write_bytes("un café".encode()[:-1])
    (folder / "binary.txt").write_bytes(b"\x7fELF\0\0")
    (folder / "letter.docx").write_bytes(b"PK")
    (folder / "locked.pdf").write_bytes(pdf_of(["Secret."], locked=True))
    (folder / "scan.pdf").write_bytes(pdf_of([SCAN] * 3))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 no more")
    (folder / "mixed.pdf").write_bytes(pdf_of(["Text.", "", SCAN, SCAN]))
    (folder / "names.csv").write_text("name,body\nA,B\n")
    (folder / "rows.csv").write_text("title,text\nA,\nB,Fine.\nC\n")
    (folder / "object.json").write_text('{"a": 1}')
    (folder / "deep.html").write_text("<div>" * 5000 + "deep" + "</div>" * 5000)
    os.mkfifo(folder / "pipe")
    (folder / "gone.txt").symlink_to("nowhere")
    status, rows = make()
    assert status == INCOMPLETE
    assert [row["source"] for row in rows] == ["good.txt", "mixed.pdf", "rows.csv"]
    found = problems(tmp_path)
    expected = {
        "empty.md": "an empty file",
        "blank.txt": "no text in it",
        "latin.txt": "not UTF-8 (byte 0xe9 at position 6): convert it by iconv, or name its encoding",
        "cut.txt": "not UTF-8 (byte 0xc3 at position 6)",
        "binary.txt": "binary data, not text",
        "letter.docx": "unknown kind '.docx'",
        "locked.pdf": "encrypted",
        "scan.pdf": "pages 1-3: a picture without text",
        "broken.pdf": "no PDF that can be read",
        "mixed.pdf": "pages 3-4: a picture without text",
        "names.csv": "no column 'text': its columns are name, body; name the right one by --text_column",
        "rows.csv": "row 1: its 'text' is empty; rows.csv: row 3: it has not as many columns",
        "object.json": "line 1: no JSON array of rows",
        "deep.html": "cannot be read: RecursionError",
        "pipe": "neither a file nor a folder",
        "gone.txt": "No such file",
    }
    assert found.keys() == expected.keys()
    assert {name: found[name] for name in expected if f"{name}: {expected[name]}" not in found[name]} == {}, found
    told = capsys.readouterr()
    assert "3 passages from 3 of 17 files" in told.out
    assert "14 files not read, 2 read in part" in told.err
    assert all(name in told.err for name in expected)


@pytest.mark.parametrize(
    ("encoding", "arguments"),
    [
        ("utf-8-sig", ()),
        ("utf-16", ()),
        ("utf-32", ()),
        ("cp1252", ("--encoding", "cp1252")),
        ("utf-8", ("--encoding", "cp1252")),  # UTF-8 is UTF-8 all the same
    ],
)
def test_encodings(folder: Path, make: Make, encoding: str, arguments: tuple[str, ...]) -> None:
    for name, head in {"a.txt": "", "b.md": "", "c.html": "<p>", "d.csv": "text\n"}.items():
        (folder / name).write_bytes(f"{head}un café\n".encode(encoding))
    status, rows = make(*arguments)
    assert status == 0 and [row["contents"].splitlines()[1] for row in rows] == ["un café"] * 4


def test_html_is_read_in_the_encoding_that_it_declares(folder: Path, make: Make) -> None:
    for encoding in ("iso-8859-1", "iso-2022-jp", "windows-1252"):
        word = "東京" if encoding == "iso-2022-jp" else "“café”" if encoding == "windows-1252" else "café"
        page = f'<html><head><meta http-equiv=x content="text/html; charset={encoding}"></head><p>{word}</html>'
        (folder / f"{encoding}.html").write_bytes(page.encode(encoding))
    status, rows = make()
    assert status == 0
    assert [row["contents"].splitlines()[1] for row in rows] == ["東京", "café", "“café”"]


def test_names_links_and_hidden_files(
    folder: Path, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a" / "b é").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("a/b é/c.txt", "new\nline.txt", "new\\nline.txt", ".hidden.txt", ".git/config.txt", '"quoted".txt'):
        (folder / name).write_text(name)
    (folder / os.fsdecode(b"byte\xff.txt")).write_text("byte")
    (folder / "0_up").symlink_to("..")
    (folder / "a" / "round").symlink_to("..")
    (folder / "0_again.txt").symlink_to("a/b é/c.txt")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "o.txt").write_text("outside")
    (folder / "elsewhere").symlink_to(outside)
    (folder / "self.txt").symlink_to("self.txt")
    status, rows = make()
    assert status == INCOMPLETE and "Too many levels" in problems(tmp_path)["self.txt"]
    assert {row["source"] for row in rows} == {
        "a/b é/c.txt", "new\\nline.txt", "new\\\\nline.txt", '"quoted".txt', "byte\\xff.txt", "elsewhere/o.txt"
    }  # fmt: skip
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(len(row["contents"].splitlines()[0]) < 40 for row in rows), "a title is one line"
    assert "2 hidden files and folders not read" in capsys.readouterr().out
    _, more = make("--hidden")
    assert {row["source"] for row in more} - {row["source"] for row in rows} == {".git/config.txt", ".hidden.txt"}


def test_ids_stay_and_the_output_is_not_read_as_a_document(folder: Path) -> None:
    (folder / "a.txt").write_text("word " * 300)
    output = folder / "corpus.jsonl"
    assert main([str(folder), "--output", str(output)]) == 0
    first = output.read_bytes()
    assert [row["id"] for row in Corpus(output)] == ["a.txt#part=1", "a.txt#part=2", "a.txt#part=3"]
    (folder / "b.txt").write_text("More.")
    assert main([str(folder), "--output", str(output)]) == 0
    assert output.read_bytes().startswith(first)
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.txt",
        "b.txt",
        output.name,
        f"{output.name}.report.json",
    ]


def test_several_folders_and_files_with_the_same_names(tmp_path: Path) -> None:
    for name in ("one/a.txt", "two/a.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    given = [tmp_path / "one", tmp_path / "two", tmp_path / "two" / "a.txt", tmp_path / "c.txt"]
    output = tmp_path / "out" / "corpus.jsonl.gz"
    assert main([*map(str, given), "--output", str(output)]) == 0
    rows = [json.loads(line) for line in gzip.decompress(output.read_bytes()).splitlines()]
    assert [row["source"] for row in rows] == ["c.txt", "one/a.txt", "two/a.txt"]


def test_columns_of_rows(folder: Path, make: Make) -> None:
    long = "word " * 50_000
    (folder / "r.csv").write_text(f'name,body,url\nA,"{long}",http://a\n')
    status, rows = make("--title_column", "name", "--text_column", "body", "--keep", "url", "--words", "1000")
    assert status == 0 and len(rows) == 50 and {row["url"] for row in rows} == {"http://a"}
    assert rows[0]["contents"].startswith('"A (r.csv, row 1)"\nword word')


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        ({"contents": '"Berlin"\nIt is a city.', "title": "B"}, '"Berlin (r.jsonl, row 1)"\nIt is a city.'),
        ({"contents": "It is a city.", "title": "Berlin"}, '"Berlin (r.jsonl, row 1)"\nIt is a city.'),
        ({"contents": "It is a city.\nIt is old.", "title": "B"}, '"B (r.jsonl, row 1)"\nIt is a city.\nIt is old.'),
        ({"contents": "\nIt is a city.", "title": 7.0}, '"7 (r.jsonl, row 1)"\nIt is a city.'),
        ({"contents": "It is a city."}, '"r.jsonl, row 1"\nIt is a city.'),
        ({"contents": '"Berlin is a city."'}, '"r.jsonl, row 1"\n"Berlin is a city."'),
        ({"contents": '"Berlin"\n '}, '"r.jsonl, row 1"\n"Berlin"'),
        ({"contents": f'"{"a " * 150}"\nEnd.'}, f'"r.jsonl, row 1"\n"{"a " * 150}"\nEnd.'),
    ],
)
def test_rows_of_a_corpus_with_and_without_a_title_line(
    folder: Path, make: Make, row: dict[str, Any], contents: str
) -> None:
    """What is no title in quotation marks is text, and no word of it is lost."""
    (folder / "r.jsonl").write_text(json.dumps(row) + "\n")
    status, [made] = make("--words", "1000")
    assert status == 0 and made["contents"] == contents


def test_the_folder_of_the_report_is_made(folder: Path, make: Make, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("A.")
    report = tmp_path / "new" / "report.json"
    assert make("--report", str(report))[0] == 0 and json.loads(report.read_text())["passages"] == 1


def test_half_characters_and_control_characters(folder: Path, make: Make) -> None:
    (folder / "r.jsonl").write_text('{"title": "\\ud800", "text": "a\\u0000b \\udfff"}\n')
    status, [row] = make()
    assert status == 0 and row["contents"] == '"\ufffd (r.jsonl, row 1)"\na b \ufffd'


def test_nothing_is_written_without_a_passage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "corpus.jsonl"
    output.write_text("of before")
    (folder / "x.docx").write_bytes(b"PK")
    assert main([str(folder), "--output", str(output)]) == 2
    assert "no document has a text" in (told := capsys.readouterr().err) and "x.docx: unknown kind" in told
    assert main([str(tmp_path / "gone"), "--output", str(output)]) == 2
    assert "gone does not exist" in capsys.readouterr().err
    assert main([str(output), "--output", str(output)]) == 2
    assert output.read_text() == "of before" and len(list(tmp_path.iterdir())) == 2


def test_a_failure_while_writing_leaves_the_corpus_of_before(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corpus.jsonl"
    output.write_text("of before")
    (folder / "a.txt").write_text("A.")

    def full(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    def interrupt(*_: object) -> list[str]:
        raise KeyboardInterrupt

    for fails, status, said in ((full, 1, "the disk is full"), (interrupt, 130, "interrupted: nothing was written")):
        monkeypatch.setattr(corpus_file, "passages_of", fails)
        assert main([str(folder), "--output", str(output)]) == status
        assert said in capsys.readouterr().err
    assert output.read_text() == "of before" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--output", "notes.md"), "has to be named .jsonl"),
        (("--words", "3"), "is less than 10"),
        (("--keep", "page"), "a passage has a key of that name"),
        (("--encoding", "latin-x"), "is unknown to Python"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["docs", "--output", "c.jsonl", *arguments])
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_a_missing_library_is_named_before_anything_is_read(
    folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.pdf").write_bytes(pdf_of(["A."]))
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    assert make() == (2, [])
    assert "needs pypdfium2" in (told := capsys.readouterr().err) and "pip install -e '.[documents]'" in told


def test_ten_thousand_files_with_progress(folder: Path, make: Make, tmp_path: Path) -> None:
    for number in range(10_000):
        (folder / f"{number}.txt").write_text(f"Document {number}.")
    done = typed(str(folder), "--output", str(tmp_path / "made" / "corpus.jsonl"))
    assert done.returncode == 0 and "10000 passages from 10000 of 10000 files" in done.stdout


def test_progress_comes_every_few_seconds(folder: Path, tmp_path: Path) -> None:
    """Beside a reader that takes half a minute for one file, as it does for a large one."""
    (folder / "slow.txt").write_text("Slow.")
    code = (
        "import sys, time; from search_r1.data.documents import corpus_file, __main__\n"
        "corpus_file.PULSE_S, read = 0.1, corpus_file.passages_of\n"
        "corpus_file.passages_of = lambda *text: time.sleep(1) or read(*text)\n"
        "__main__.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, str(folder), "--output", str(tmp_path / "c.jsonl")]
    told = subprocess.run(words, env=ENV, cwd=ROOT, capture_output=True, text=True, check=True).stderr.splitlines()
    assert len([line for line in told if "read documents: 0 of 1 files" in line and line.endswith("slow.txt")]) > 2


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = programs()["data", "documents"].words(arguments)
    return subprocess.run(words, env=ENV, cwd=ROOT, capture_output=True, text=True, check=False)


def test_from_documents_to_a_served_passage_with_its_page(folder: Path, tmp_path: Path) -> None:
    """The programs as they are typed: documents, audit, index, server, query."""
    (folder / "reports").mkdir()
    (folder / "reports" / "lights é.pdf").write_bytes(
        pdf_of(["Contents of the report.", "Skarn Light was built by Josse Aldine in 1871."])
    )
    (folder / "tides.pdf").write_bytes(pdf_of(["The tide at Osk is four metres."]))
    (folder / "lune.html").write_text(PAGE)
    (folder / "guide.md").write_text("# Guide\n\nBoats leave at noon.\n")
    (folder / "towns.csv").write_text("title,text\nOsk,A town with a cathedral.\n")
    corpus, indexes = tmp_path / "corpus.jsonl", tmp_path / "indexes"
    done = typed(str(folder), "--output", str(corpus))
    assert done.returncode == 0, done.stderr
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "Who built Skarn Light?", "golden_answers": ["Josse Aldine"]}\n')
    counts = tmp_path / "audit.json"
    audited = ["audit", "--corpus_path", str(corpus), "--questions", str(questions), "--output", str(counts)]
    assert corpus_tool(audited) == 0
    assert json.loads(counts.read_text())["total"]["covered"] == 1

    builder = [sys.executable, "-m", "search_r1.search.index_builder", "--retrieval_method", "bm25"]
    builder += ["--corpus_path", str(corpus), "--save_dir", str(indexes)]
    subprocess.run(builder, env=ENV, cwd=ROOT, check=True, capture_output=True)
    port = free_port()
    server = [sys.executable, "-m", "search_r1.search.retrieval_server", "--retriever_name", "bm25", "--topk", "1"]
    server += ["--corpus_path", str(corpus), "--index_path", str(indexes / "bm25"), "--port", str(port)]
    with subprocess.Popen(server, env=ENV, cwd=ROOT) as running:
        try:
            wait_until_up(running, f"http://127.0.0.1:{port}/readyz")
            asked = {"queries": ["Who built Skarn Light?", "river Lune", "when do boats leave", "cathedral", "tide"]}
            reply = requests.post(f"http://127.0.0.1:{port}/retrieve", json=asked, timeout=60).json()["result"]
        finally:
            running.terminate()
    [light] = reply[0]
    assert light["id"] == "reports/lights é.pdf#page=2&part=1" and light["page"] == 2
    assert light["contents"] == '"reports/lights é.pdf, page 2"\nSkarn Light was built by Josse Aldine in 1871.'
    assert [found["source"] for [found] in reply[1:]] == ["lune.html", "guide.md", "towns.csv", "tides.pdf"]
