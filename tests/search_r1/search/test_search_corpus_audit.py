"""The coverage audit: what counts as an answer in a text, counts by hand, a real server, real passages."""

from __future__ import annotations

import gzip
import json
import logging
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_corpora import corpus_of, write_rows

from search_r1.data.corpus.answer_matching import AnswerMatcher, answer_tokens
from search_r1.data.corpus.audit import first_rank, matcher_of, read_questions, scan_corpus
from search_r1.data.corpus.command_line import main
from search_r1.rewards.metrics import normalize_answer
from search_r1.search.corpus import Corpus


def _question(name: str, text: str, *golden: str) -> dict:
    return {"id": name, "question": text, "golden_answers": list(golden)}


# Over the five passages of the fixture corpus_file: three span questions with their answer in it, two without.
QUESTIONS = [
    _question("born", "Where was Anna Velt born?", "Morn"),
    _question("capital", "Lune Tarsia", "the Osk!", "Oslo"),
    _question("singer", "Morn", "a singer"),
    _question("nowhere", "Lune", "Atlantis"),
    _question("inside", "Who erupted?", "rupted"),
    _question("yes", "Is Morn a city?", "Yes"),
    _question("article", "Which article?", "The", "A."),
]


@pytest.mark.parametrize(
    ("text", "answer", "stands"),
    [
        ("It is The Art, of War.", "art of a war", True),
        ("a party", "art", False),
        ("the arts", "art", False),
        ("New York City", "New York", True),
        ("New York City", "York City", True),
        ("New York", "New York City", False),
        ("York New", "New York", False),
        ("New, new York", "New York", True),
        ("born in 1,000 BC", "1000", True),
        ("the U.S. army", "US", True),
        ("a Paris-based firm", "Paris", False),
        ("Beyonc\u00e9 sang", "beyonc\u00c9", True),
        ("anything", "The", False),
        ("", "x", False),
        ("东京是日本的首都，也是城市。", "首都", True),
        ("东京是日本的首都，也是城市。", "都首", False),
        ("東京タワーの高さは333メートル", "333", True),
        ("それは「東京タワー」です", "東京タワー", True),
        ("수도는 서울이다.", "서울", True),
        ("กรุงเทพมหานครเป็นเมืองหลวง", "เมืองหลวง", True),
        ("いまはハンがある", "パン", False),
        ("नई दिल्ली भारत की", "दिल्ली", True),
        ("नई दिल्ली भारत की", "दिल्", False),
        ("he said “Rome” in 東京", "“Rome”", True),
    ],
)
def test_an_answer_stands_in_a_text_on_token_boundaries(text: str, answer: str, stands: bool) -> None:
    matcher = AnswerMatcher([answer_tokens(answer), answer_tokens("another")])
    assert matcher.find(answer_tokens(text)) == ({answer_tokens(answer)} if stands else set())


_WORDS = st.lists(st.sampled_from("xyz"), max_size=12).map(tuple)


@given(text=_WORDS, answers=st.lists(_WORDS.filter(len), max_size=6))
def test_many_answers_are_found_as_one_by_one(text: tuple[str, ...], answers: list[tuple[str, ...]]) -> None:
    expected = {answer for answer in answers if f" {' '.join(answer)} " in f" {' '.join(text)} "}
    assert AnswerMatcher(answers).find(text) == expected


def test_questions_that_nothing_can_prove_are_set_apart(tmp_path: Path) -> None:
    rows = [
        _question("0", "q", "Paris", "the Paris", "yes"),
        _question("1", "q", "No."),
        _question("2", "q", "The", "a"),
        _question("3", "q", "THE", "yes"),
        {"question": "no id", "golden_answers": ["x"]},
    ]
    questions = read_questions(write_rows(tmp_path / "q.jsonl", *rows))
    assert [(q.id, q.kind, q.answers) for q in questions] == [
        ("0", "span", (("paris",),)),
        ("1", "yes_no", ()),
        ("2", "empty", ()),
        ("3", "yes_no", ()),
        ("5", "span", (("x",),)),
    ]


def test_audit_of_a_corpus_alone(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus_file.read_bytes()))
    one, two = write_rows(tmp_path / "1.jsonl", *QUESTIONS[:4]), write_rows(tmp_path / "2.jsonl", *QUESTIONS[4:])
    questions = ["--questions", str(one), str(two)]
    outputs = ["--output", str(tmp_path / "new" / "a.json"), "--details", str(tmp_path / "other" / "d.jsonl")]
    assert main(["audit", "--corpus_path", str(packed), *questions, *outputs]) == 0
    report = json.loads((tmp_path / "new" / "a.json").read_text())
    first = {"questions": 4, "yes_no": 0, "empty": 0, "span": 4, "covered": 3, "coverage": 0.75}
    second = {"questions": 3, "yes_no": 1, "empty": 1, "span": 1, "covered": 0, "coverage": 0.0}
    assert report == {
        "corpus": str(packed),
        "passages": 5,
        "url": None,
        "files": [{"file": str(one)} | first, {"file": str(two)} | second],
        "total": {"questions": 7, "yes_no": 1, "empty": 1, "span": 5, "covered": 3, "coverage": 0.6},
    }
    details = [json.loads(line) for line in (tmp_path / "other" / "d.jsonl").read_text().splitlines()]
    assert [(row["file"], row["id"], row["covered"]) for row in details] == [
        (str(one), "nowhere", False),
        (str(two), "inside", False),
    ]
    printed = capsys.readouterr()
    assert "| 60.0%" in printed.out.splitlines()[-1]
    assert printed.err == ""  # no progress bar where there is no terminal


def test_audit_of_a_server(small_server: str, corpus_file: Path, tmp_path: Path) -> None:
    """By hand: "born" is answered by the first passage, "capital" by the second, "singer" by neither of the two."""
    questions = [
        str(write_rows(tmp_path / "1.jsonl", *QUESTIONS[:2])),
        str(write_rows(tmp_path / "2.jsonl", *QUESTIONS[2:])),
    ]
    arguments = ["audit", "--corpus_path", str(corpus_file), "--questions", *questions, "--k", "2,1"]
    outputs = ["--output", str(tmp_path / "a.json"), "--details", str(tmp_path / "d.jsonl")]
    assert main([*arguments, "--url", f"{small_server}/retrieve", *outputs]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert [[found["hits"] for found in row["recall"].values()] for row in report["files"]] == [[1, 2], [0, 0]]
    assert report["total"]["recall"] == {
        "1": {"hits": 1, "of_all": 0.2, "of_covered": 0.3333},
        "2": {"hits": 2, "of_all": 0.4, "of_covered": 0.6667},
    }
    details = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert {row["id"]: row["covered"] for row in details} == {"singer": True, "nowhere": False, "inside": False}


def test_a_server_of_another_corpus_is_noticed(
    small_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_rows(tmp_path / "other.jsonl", {"id": "0", "contents": "nothing of this"})
    questions = write_rows(tmp_path / "q.jsonl", *QUESTIONS)
    arguments = ["audit", "--corpus_path", str(corpus), "--questions", str(questions)]
    with caplog.at_level(logging.WARNING):
        assert main([*arguments, "--url", f"{small_server}/retrieve"]) == 0
    # "born", "capital" and, among the best 20, no other: "Morn" has two hits
    assert f"answers of 2 questions that are not in {corpus}" in caplog.text


def test_a_wrong_server_is_one_line(small_server: str, corpus_file: Path, tmp_path: Path, capsys) -> None:
    questions = write_rows(tmp_path / "q.jsonl", *QUESTIONS)
    arguments = ["audit", "--corpus_path", str(corpus_file), "--questions", str(questions), "--k", "101"]
    assert main([*arguments, "--url", f"{small_server}/retrieve"]) == 1
    assert "error: retriever" in capsys.readouterr().err
    assert main([*arguments, "--url", "localhost"]) == 2
    assert capsys.readouterr().err == "error: 'localhost' is not an address: write http://host:port/retrieve\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "q", "golden_answers": "x"}', "'golden_answers' is 'x', not a list of strings"),
        ('{"question": "q", "golden_answers": []}', "'golden_answers' is [], not a list of strings"),
        ('{"question": "q", "golden_answers": [1]}', "'golden_answers' is [1], not a list of strings"),
        ('{"question": " ", "golden_answers": ["x"]}', "no 'question'"),
        ('{"question": ', "Expecting value"),
        ("[]", "a JSON list"),
        ("", "blank line"),
    ],
)
def test_a_bad_question_names_file_and_line(
    corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, reason: str
) -> None:
    path = write_rows(tmp_path / "q.jsonl", QUESTIONS[0])
    path.write_text(path.read_text() + line + "\n")
    assert main(["audit", "--corpus_path", str(corpus_file), "--questions", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}, line 2: ") and reason in error


def test_bad_files_are_one_line(corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = write_rows(tmp_path / "q.jsonl", *QUESTIONS)
    cut, empty, bad = tmp_path / "cut.jsonl.gz", tmp_path / "empty.jsonl", tmp_path / "bad.jsonl"
    cut.write_bytes(gzip.compress(corpus_file.read_bytes())[:-20])
    empty.touch()
    bad.write_text(corpus_file.read_text() + '{"id": "5"}\n')
    for path, reason in (
        (cut, "cannot be read after line"),
        (empty, "is empty"),
        (tmp_path / "none", "does not exist"),
        (bad, ", line 6: no 'contents'"),
    ):
        assert main(["audit", "--corpus_path", str(path), "--questions", str(questions)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}") and reason in error


@pytest.mark.parametrize("option", ["--output", "--details"])
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the corpus nor the questions are there to be read."""
    (tmp_path / "file").touch()
    read = ["--corpus_path", str(tmp_path / "none"), "--questions", str(tmp_path / "none")]
    # /proc takes no files of anybody, not even of root
    unwritable = (tmp_path / "file" / "x.json", Path("/proc/x.json"))
    for path, reason in (*((path, "its folder takes no files") for path in unwritable), (tmp_path, "is a folder")):
        assert main(["audit", *read, option, str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {option} {path}") and reason in error and error.count("\n") == 1


def test_a_folder_of_subsets_that_cannot_be_made_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = ["--corpus_path", str(tmp_path / "none"), "--questions", str(tmp_path / "none")]
    assert main(["audit", *read, "--url", "http://127.0.0.1:9/retrieve", "--subsets", "/proc/subsets"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: /proc/subsets could not be written: ")
    assert error.count("\n") == 1


def test_ctrl_c_ends_it_with_a_line(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("search_r1.data.corpus.command_line.audit", interrupt)
    assert main(["audit", "--corpus_path", str(corpus_file), "--questions", str(tmp_path / "q")]) == 130
    assert capsys.readouterr().err == "interrupted: files that were not named are not written\n"


@pytest.mark.parametrize("arguments", [["--k", "0"], ["--k", "1,x"], ["--questions"], []])
def test_wrong_arguments(corpus_file: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["audit", "--corpus_path", str(corpus_file), *arguments])
    assert end.value.code == 2


def test_a_large_corpus_is_not_held_in_memory(tmp_path: Path) -> None:
    path = corpus_of(tmp_path, *(f"{row} {row} {'x' * 2000}" for row in range(4000))).path
    assert path.stat().st_size > 8_000_000
    tracemalloc.start()
    try:
        num_passages, found = scan_corpus(path, AnswerMatcher([("3999", "3999"), ("4000",)]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (num_passages, found) == (4000, {("3999", "3999")})
    assert peak < 1_500_000


def test_real_questions_and_passages_agree_with_a_plain_search(
    wiki_mini: Path, nq_questions: list[dict], tmp_path: Path
) -> None:
    questions = read_questions(write_rows(tmp_path / "q.jsonl", *nq_questions[:40]))
    corpus = tmp_path / "part.jsonl"
    corpus.write_bytes(b"".join(wiki_mini.open("rb").readlines()[:6000]))
    num_passages, found = scan_corpus(corpus, matcher_of(questions))
    texts = [f" {normalize_answer(passage['contents'])} " for passage in Corpus(corpus)]
    expected = {
        answer for q in questions for answer in q.answers if any(f" {' '.join(answer)} " in text for text in texts)
    }
    assert num_passages == len(texts) == 6000
    assert found == expected and 10 < len(expected) < sum(len(q.answers) for q in questions)
    rows = [text.split() for text in texts[:500]]
    for question in questions:
        places = [i for i, text in enumerate(texts[:500]) if any(f" {' '.join(a)} " in text for a in question.answers)]
        assert first_rank(question, rows) == (places[0] + 1 if places else None)
