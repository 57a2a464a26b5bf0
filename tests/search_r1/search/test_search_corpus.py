"""The corpus on disk: random access, bad rows, compressed files; stripping the agent's tags from its texts."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from search_r1.errors import CorpusError
from search_r1.search.corpus import Corpus, title_and_text
from search_r1.search.sanitize import strip_agent_tags


def _write(folder: Path, text: str | bytes) -> Path:
    path = folder / "c.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_reads_any_row_with_its_own_id(corpus_file: Path) -> None:
    corpus = Corpus(corpus_file)
    assert len(corpus) == 5
    assert [corpus[row]["id"] for row in (4, 0, 2)] == ["p50", "p10", "p30"]
    assert corpus[2]["contents"].startswith('"Beyoncé"\n') and "東京" in corpus[2]["contents"]
    assert corpus[2]["url"] == "w/30"
    with pytest.raises(IndexError, match="row -1 is outside"):
        corpus[-1]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    corpus = Corpus(_write(tmp_path, '{"id": 7, "contents": "a"}\n{"id": "8", "text": "b", "title": "T"}'))
    assert [passage["id"] for passage in corpus] == ["7", "8"]
    assert corpus[1]["contents"] == '"T"\nb'


@pytest.mark.parametrize(
    ("title", "contents"),
    [
        ("null", "b"),
        ("NaN", "b"),
        ("[1]", "b"),
        ("1984", '"1984"\nb'),
        ("0", '"0"\nb'),
        ("7.0", '"7"\nb'),
        ("2.5", '"2.5"\nb'),
        ('""', '""\nb'),
    ],
)
def test_a_title_is_a_text_or_the_digits_of_a_number(tmp_path: Path, title: str, contents: str) -> None:
    corpus = Corpus(_write(tmp_path, f'{{"id": 7, "contents": null, "text": "b", "title": {title}}}\n'))
    assert corpus[0]["contents"] == contents


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Osk"\nA town.\nOld.', "Osk", "A town.\nOld."),
        ("A town.", "", "A town."),
        ("\nA town.", "", "A town."),
        ("Osk\nA town.", "Osk", "A town."),
        ('"Osk"', "Osk", ""),
        ('"', "", '"'),
        ("", "", ""),
    ],
)
def test_a_single_line_is_text_unless_it_is_quoted(contents: str, title: str, text: str) -> None:
    assert title_and_text(contents) == (title, text)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"id": "1", "contents": ', "Expecting value"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"contents": "x"}', "no 'id'"),
        (b'{"id": "1"}', "no 'contents'"),
        (b'{"id": "1", "contents": 3}', "'contents' is a int"),
        (b'{"id": "1", "contents": "\xff"}', "codec can't decode"),
        (b"", "blank line"),
    ],
)
def test_malformed_row_names_file_and_line(tmp_path: Path, bad: bytes, reason: str) -> None:
    path = _write(tmp_path, b'{"id": "0", "contents": "fine"}\n' + bad + b'\n{"id": "2", "contents": "fine"}\n')
    with pytest.raises(CorpusError) as caught:
        Corpus(path)
    assert f"{path}, line 2" in str(caught.value) and reason in str(caught.value)


def test_other_files_are_told_what_works(tmp_path: Path) -> None:
    """Rows with title and text, and the command that makes a corpus of other files."""
    for path in (_write(tmp_path, "title,text\nOsk,A town.\n"), tmp_path):
        with pytest.raises(CorpusError, match="search-r1 data documents FOLDER --output corpus.jsonl"):
            Corpus(path)
    with pytest.raises(CorpusError, match='or {"id": "...", "title": "...", "text": "..."}'):
        Corpus(tmp_path / "c.jsonl")


def test_malformed_row_among_many_is_found_when_read(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(row), "contents": f"passage {row}"}) for row in range(5000)]
    lines[2] = "{}"  # opening parses a sample, which skips this one
    corpus = Corpus(_write(tmp_path, "\n".join(lines)))
    assert corpus[4999]["contents"] == "passage 4999"
    with pytest.raises(CorpusError, match="line 3: no 'id'"):
        list(corpus)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        Corpus(tmp_path / "none.jsonl")
    with pytest.raises(CorpusError, match="is empty"):
        Corpus(_write(tmp_path, ""))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that uncompressed corpora go to."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_the_suffix_may_be_in_capitals(corpus_file: Path, tmp_path: Path, cache: Path) -> None:
    packed = tmp_path / "CORPUS.JSONL.GZ"
    packed.write_bytes(gzip.compress(corpus_file.read_bytes()))
    assert list(Corpus(packed)) == list(Corpus(corpus_file))


def test_compressed_corpus_is_the_same_corpus(corpus_file: Path, tmp_path: Path, cache: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_file.read_bytes()))
    plain, first, second = Corpus(corpus_file), Corpus(packed), Corpus(packed)
    assert list(first) == list(plain) == list(second)
    assert first.digest == plain.digest
    assert len(list(cache.rglob("*.jsonl"))) == 1

    packed.write_bytes(gzip.compress(b'{"id": "new", "contents": "changed"}\n'))
    assert [passage["id"] for passage in Corpus(packed)] == ["new"]
    assert len(list(cache.rglob("*.jsonl"))) == 1, "the earlier copy has gone"
    assert list(first) == list(plain), "and who had it open still reads it"
    os.utime(packed, (1, 1))
    (left,) = cache.rglob("*.jsonl")
    (left.parent / "half a copy of a killed process").touch()
    assert len(Corpus(packed)) == 1
    (copy,) = (path for path in cache.rglob("*") if path.is_file())
    assert copy != left

    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(packed.read_bytes())
    Corpus(other)
    assert len(list(cache.rglob("*.jsonl"))) == 2, "each file has its copy"


def test_processes_that_open_a_changing_corpus_at_once_read_it_whole(tmp_path: Path, cache: Path) -> None:
    """Each reads one version, complete, while others replace the copy of another version."""
    packed = tmp_path / "corpus.jsonl.gz"

    def write(version: int) -> None:
        rows = "".join(f'{{"id": "{row}", "contents": "{version}"}}\n' for row in range(2_000))
        staging = tmp_path / "staging"
        staging.write_bytes(gzip.compress(rows.encode(), 1))
        staging.replace(packed)

    script = (
        "import sys; from search_r1.errors import CorpusError; from search_r1.search.corpus import Corpus\n"
        "read = 0\n"
        "while read < 5:\n"
        "    try: rows = list(Corpus(sys.argv[1]))\n"
        "    except CorpusError as error: assert 'changed while' in str(error), error\n"
        "    else: read += 1; assert len(rows) == 2_000 and len({row['contents'] for row in rows}) == 1\n"
    )
    write(0)
    command = [sys.executable, "-c", script, str(packed)]
    processes = [subprocess.Popen(command, env=os.environ | {"TMPDIR": str(cache)}) for _ in range(3)]
    version = 0
    while any(process.poll() is None for process in processes):
        version += 1
        write(version)
        time.sleep(0.05)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 1


def test_cut_gzip_is_an_error_and_leaves_nothing(corpus_file: Path, tmp_path: Path, cache: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_file.read_bytes())[:-20])
    with pytest.raises(CorpusError, match="cannot decompress"):
        Corpus(packed)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_digest_tells_corpora_apart(tmp_path: Path) -> None:
    first = Corpus(_write(tmp_path, '{"id": "0", "contents": "ab"}\n')).digest
    assert Corpus(_write(tmp_path, '{"id": "0", "contents": "ac"}\n')).digest != first


# --- the agent's tags


_TAG = re.compile(r"<\s*/?\s*(?:answer|search|information|think|result)\s*/?\s*>", re.IGNORECASE)
_PIECES = ["<", "</", "< /", ">", "/>", "answer", "<answer>", "</Search>", "<inform", "ation>", "think", "ans", "wer"]
_PIECES += [" ", "x"]


def _until_none_is_left(text: str) -> str:
    removed = 1
    while removed:
        text, removed = _TAG.subn("", text)
    return text


@settings(max_examples=8 * settings.default.max_examples)
@given(text=st.lists(st.sampled_from(_PIECES), max_size=14).map("".join))
@example(text="a <answer>b</answer> c <SEARCH>x</ Search > <ans<answer>wer>Paris</answer>")
@example(text="<information><think><result>x</result></think></information>")
@example(text="<answ" * 50 + "<think>" + "er>" * 50)
@example(text="a > b <answer> c < d > e </answer")
def test_one_pass_removes_what_repeated_removal_removes(text: str) -> None:
    assert strip_agent_tags(text) == _until_none_is_left(text)


def test_what_is_no_tag_of_the_agent_stays() -> None:
    text = "1 < 2 > 0, <b>bold</b>, <answers>"
    assert strip_agent_tags(f"<answer>{text}</ Search >") == text


@pytest.mark.parametrize("before", ["x <", "x </", "x <answer", "x <answer/"])
def test_a_long_run_of_white_space_is_one_pass_too(before: str) -> None:
    text = before + " " * 200_000  # to try every way to cut it in two would take half an hour
    assert strip_agent_tags(f"{text}y") == f"{text}y"
    assert strip_agent_tags(f"x <{text[-200_000:]}/answer{text[-200_000:]}>y") == "x y"


def test_deep_nesting_is_one_pass_too() -> None:
    depth = 2_000  # removing one level at a time would read the text 20,000 times
    assert strip_agent_tags("<answ" * depth + "<think>" + "er>" * depth) == ""
