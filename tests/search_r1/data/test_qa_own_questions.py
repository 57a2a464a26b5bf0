"""One's own questions, and the sets that have no entry of their own: the same rows for training and for evaluation."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_scripts import questions, run_script, write_lines
from local_hub import LocalHub, asked_from_here, running

from search_r1.data.qa.source_files import FLASHRAG_REPO
from search_r1.evaluation.questions import load_questions, stratified_subset
from verl.config import load_config
from verl.data.prompts import PromptSource
from verl.errors import DataError
from verl.protocol import Segment, Source, Status, Trajectory
from verl.trainer.sampling.scoring import make_reward

TRAIN_MERGE, TEST_MERGE = "data_process/qa_search_train_merge.py", "data_process/qa_search_test_merge.py"
ROWS = [
    {"question": "Who wrote Emma", "answer": "Jane Austen", "type": "book"},
    {"question": "Is the Rhine a river?", "answer": ["yes", "it is"], "type": "place"},
    {"question": 'When was "Émile" published?', "answer": 1762, "type": "book"},
]
FOUND = [
    ("Who wrote Emma?", ["Jane Austen"], "book"),
    ("Is the Rhine a river?", ["yes", "it is"], "place"),
    ('When was "Émile" published?', ["1762"], "book"),
]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """In the format of the name. Several answers are JSON in a table; all answers are lists of texts in Parquet."""
    if path.suffix == ".jsonl":
        write_lines(path, rows)
    elif path.suffix == ".json":
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "]")
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["question", "golden_answers", "type"])
            for row in rows:
                answer = json.dumps(row["answer"]) if isinstance(row["answer"], list) else row["answer"]
                table.writerow([row["question"], answer, row["type"]])
    else:
        answers = [row["answer"] if isinstance(row["answer"], list) else [str(row["answer"])] for row in rows]
        pq.write_table(pa.Table.from_pylist([row | {"answer": a} for row, a in zip(rows, answers, strict=True)]), path)


def answered(source: PromptSource, tokenizer, text: str) -> Trajectory:
    """An episode of the first prompt that says `text`."""
    [prompt] = source.next(1)
    segments = [Segment(Source.PROMPT, prompt.ids)]
    ids = tuple(tokenizer.encode(text))
    segments.append(Segment(Source.POLICY, ids, (0.0,) * len(ids)))
    return Trajectory("g", prompt, segments, Status.ANSWERED)


@pytest.mark.parametrize("name", ["own.jsonl", "own.json", "own.csv", "own.parquet"])
def test_own_questions_are_trained_on_and_evaluated(name: str, tmp_path: Path, byte_tokenizer, capsys) -> None:
    """One file, read by data processing and by evaluation: same questions, answers, ids and subset; reward is EM."""
    path = tmp_path / name
    write(path, ROWS)
    assert run_script(TRAIN_MERGE, "--data_sources", f"mine={path}", "--local_dir", tmp_path / "out") == 0
    assert f"{tmp_path}/out/train.parquet: 3 prompts (3 of mine from {name})" in capsys.readouterr().out
    made = tmp_path / "out/train.parquet"
    source = PromptSource(str(made), byte_tokenizer, max_start_length=2048, shuffle=False)
    assert [prompt.data_source for prompt in source.all()] == ["mine"] * 3

    asked, prompts = load_questions([f"mine={path}"], None), load_questions([str(made)], None)
    assert [(found.text, list(found.golden_answers), found.stratum) for found in asked] == FOUND
    assert [found.key for found in asked] == ["mine/own_0", "mine/own_1", "mine/own_2"]
    for field in ("key", "text", "golden_answers", "stratum"):
        assert [getattr(found, field) for found in prompts] == [getattr(found, field) for found in asked]
    subsets = [[found.key for found in stratified_subset(some, 2)] for some in (prompts, asked)]
    assert subsets[0] == subsets[1]

    config = load_config("ppo_trainer")
    reward = make_reward(config, config.reward.function, config.reward.kwargs)
    for answer, value in (("Jane Austen", 1.0), ("Rousseau", 0.0)):
        source = PromptSource(str(made), byte_tokenizer, max_start_length=2048, shuffle=False)
        score, _ = reward.score(answered(source, byte_tokenizer, f"<answer> {answer} </answer>"), byte_tokenizer)
        assert score == value


def test_own_questions_beside_published_sets_keep_the_order_of_the_list(tmp_path: Path) -> None:
    write_lines(tmp_path / "qa/nq/test.jsonl", questions(2, "nq"))
    write_lines(tmp_path / "mine.jsonl", ROWS)
    names = f"mine={tmp_path / 'mine.jsonl'},nq,web={tmp_path / 'mine.jsonl'}"
    arguments = ("--data_sources", names, "--input_dir", tmp_path / "qa", "--local_dir", tmp_path)
    assert run_script(TEST_MERGE, *arguments) == 0
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert [row["data_source"] for row in rows] == ["mine"] * 3 + ["nq"] * 2 + ["web"] * 3


def test_a_prompt_file_can_be_made_anew_with_another_template(tmp_path: Path) -> None:
    write_lines(tmp_path / "mine.jsonl", ROWS)
    first = ("--data_sources", f"mine={tmp_path / 'mine.jsonl'}", "--local_dir", tmp_path / "first")
    assert run_script(TRAIN_MERGE, *first) == 0
    again = ("--data_sources", f"mine={tmp_path / 'first/train.parquet'}", "--local_dir", tmp_path / "second")
    assert run_script(TRAIN_MERGE, *again, "--template_type", "r1") == 0
    made = (tmp_path / "first/train.parquet").read_bytes()
    assert run_script(TRAIN_MERGE, *again[:-1], tmp_path / "first", "--limit", 2) == 2
    assert (tmp_path / "first/train.parquet").read_bytes() == made
    before, after = (pq.read_table(tmp_path / f"{name}/train.parquet").to_pylist() for name in ("first", "second"))
    assert before[0]["prompt"] != after[0]["prompt"]
    assert [row | {"prompt": 0} for row in after] == [row | {"prompt": 0} for row in before]


@pytest.mark.parametrize(("suffix", "place"), [("jsonl", ":2"), ("json", ":3"), ("csv", ":3"), ("parquet", ": row 1")])
def test_a_bad_row_names_file_and_row_to_both(suffix: str, place: str, tmp_path: Path, capsys) -> None:
    path = tmp_path / f"mine.{suffix}"
    write(path, [ROWS[0], ROWS[1] | {"question": " "}])
    assert run_script(TRAIN_MERGE, "--data_sources", f"mine={path}", "--local_dir", tmp_path / "o") == 2
    assert f"{path}{place}: the question is ' ', not a text" in capsys.readouterr().err
    with pytest.raises(DataError, match="the question is ' ', not a text") as error:
        load_questions([f"mine={path}"], None)
    assert f"{path}{place}: " in str(error.value)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ("mine=absent.jsonl", "absent.jsonl does not exist"),
        ("mine=absent.parquet", "absent.parquet does not exist"),
        ("a/b=FILE", "'a/b' cannot be the name of a set"),
        ("FILE", r"good.jsonl' is a file, or no name of a set; write NAME=FILE, such as mine=.*/good.jsonl"),
        ("gone.csv", "'gone.csv' is a file, or no name of a set"),
        (r"C:\data\q.jsonl", "is a file, or no name of a set"),
        ("mine=PIPE", "pipe.jsonl is a pipe or a device: save what it gives in a file"),
        ("mine=FOLDER", "folder.csv is a folder"),
        ("mine=FILE,mine=FILE", "each once"),
        ("web_question", r"there is no set 'web_question' in .*did you mean web_questions\?"),
        ("mine", "there is no set 'mine' in .*mine=FILE"),
        ("mine=WRONG", "keys input, answer; rows of your own need question and answer; known formats"),
        ("mine=LINES", r"lines.json:1: no JSON array .* file with an object on each line is named .jsonl"),
        ("hotpotqa", "/qa/hotpotqa: the train split is not there; place train.jsonl in this folder"),
        ("squad", "squad has no train split: .*/squad has none of train.jsonl"),
    ],
)
def test_what_is_refused(sources: str, message: str, tmp_path: Path, capsys) -> None:
    write_lines(tmp_path / "good.jsonl", ROWS)
    write_lines(tmp_path / "wrong.jsonl", [{"input": "a", "answer": "b"}])
    write_lines(tmp_path / "lines.json", ROWS)
    write_lines(tmp_path / "qa/web_questions/train.jsonl", questions(1))
    write_lines(tmp_path / "qa/squad/dev.jsonl", questions(1))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.csv").mkdir()
    names = {"WRONG": "wrong.jsonl", "LINES": "lines.json", "PIPE": "pipe.jsonl", "FOLDER": "folder.csv"}
    for word, name in ({"FILE": "good.jsonl"} | names).items():
        sources = re.sub(rf"(^|=){word}\b", lambda found, name=name: f"{found[1]}{tmp_path / name}", sources)
    arguments = ("--data_sources", sources, "--input_dir", tmp_path / "qa", "--local_dir", tmp_path / "o")
    assert run_script(TRAIN_MERGE, *arguments) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said


# (files of a folder, those that a test takes, or the reason why it takes none)
LAYOUTS: list[Any] = [
    (["web_questions/train", "web_questions/test"], ["web_questions/test"]),
    (["squad/train", "squad/dev"], ["squad/dev"]),
    (["strategyqa/dev"], ["strategyqa/dev"]),
    (["strategyqa/train"], ["strategyqa/train"]),
    (["nq/test", "nq/dev", "hotpotqa/dev", "hotpotqa/train"], ["nq/test", "hotpotqa/dev"]),
    (["nq/dev", "nq/train"], "the test split is not there"),
    (["bamboogle/dev"], "the test split is not there"),
]


@pytest.mark.parametrize(("files", "expected"), LAYOUTS)
def test_data_processing_and_evaluation_take_the_same_files(files, expected, tmp_path: Path, capsys) -> None:
    for name in files:
        write_lines(tmp_path / "qa" / f"{name}.jsonl", questions(2, name.replace("/", "-")))
    names = ",".join(dict.fromkeys(name.partition("/")[0] for name in files))
    arguments = ("--data_sources", names, "--input_dir", tmp_path / "qa", "--local_dir", tmp_path / "o")
    status = run_script(TEST_MERGE, *arguments)
    if isinstance(expected, str):
        assert status == 2 and expected in capsys.readouterr().err
        with pytest.raises(DataError, match=expected):
            load_questions([], tmp_path / "qa")
        return
    assert status == 0
    asked, prompts = load_questions([], tmp_path / "qa"), load_questions([str(tmp_path / "o/test.parquet")], None)
    assert [found.key for found in asked] == [found.key for found in prompts]
    assert [found.key for found in asked[::2]] == [f"{x.partition('/')[0]}/{x.replace('/', '-')}_0" for x in expected]


def test_other_sets_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """By the name that FlashRAG has for them: a test takes `test`, else `dev`; a name that is not there is an error."""
    lines = {name: "".join(json.dumps(row) + "\n" for row in questions(2, name)).encode() for name in ("wq", "sq")}
    hub = LocalHub({FLASHRAG_REPO: {"web_questions/test.jsonl": lines["wq"], "squad/dev.jsonl": lines["sq"]}})

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with running(hub), asked_from_here(hub):
        assert run_script(TEST_MERGE, "--data_sources", "web_questions,squad", "--local_dir", tmp_path / "o") == 0
        said = capsys.readouterr().out
        assert run_script(TEST_MERGE, "--data_sources", "web_question", "--local_dir", tmp_path / "o") == 2
    assert "has no web_question/test.jsonl or web_question/dev.jsonl or " in capsys.readouterr().err
    assert "4 prompts (2 of web_questions from test.jsonl, 2 of squad from dev.jsonl)" in said
    made = load_questions([str(tmp_path / "o/test.parquet")], None)
    assert [found.key for found in made] == ["web_questions/wq_0", "web_questions/wq_1", "squad/sq_0", "squad/sq_1"]


def test_the_originals_in_a_folder_are_evaluated_too(tmp_path: Path) -> None:
    table = tmp_path / "qa/bamboogle/Bamboogle Prerelease - Sheet1.csv"
    table.parent.mkdir(parents=True)
    table.write_text("Question,Answer\nWho?,Me\n")
    arguments = ("--data_sources", "bamboogle", "--input_dir", tmp_path / "qa", "--local_dir", tmp_path)
    assert run_script(TEST_MERGE, *arguments) == 0
    [asked], [prompt] = load_questions([], tmp_path / "qa"), load_questions([str(tmp_path / "test.parquet")], None)
    assert asked.key == prompt.key == "bamboogle/test_0" and asked.golden_answers == prompt.golden_answers
