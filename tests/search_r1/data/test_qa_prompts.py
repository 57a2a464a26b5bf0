"""From question files to prompt files by the published scripts: the schema, the order, real files, what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_scripts import REAL_QUESTIONS, questions, run_script, write_lines
from documented_commands import Checkout, Command

from search_r1.data.qa import build
from search_r1.llm_agent.templates import load_template
from verl.data.prompts import PromptSource

# Written out: what training, rewards and the published files have.
SCHEMA = {
    "data_source": pa.string(),
    "prompt": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    "ability": pa.string(),
    "reward_model": pa.struct(
        [("style", pa.string()), ("ground_truth", pa.struct([("target", pa.list_(pa.string()))]))]
    ),
    "extra_info": pa.struct([("split", pa.string()), ("index", pa.int64())]),
    "id": pa.string(),
    "question": pa.string(),
    "golden_answers": pa.list_(pa.string()),
    "metadata": pa.string(),
}
TRAIN_MERGE, TEST_MERGE = "qa_search_train_merge", "qa_search_test_merge"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """NQ with three splits, HotpotQA with two, StrategyQA with one; Bamboogle as published."""
    for split, count in (("train", 3), ("dev", 2), ("test", 2)):
        write_lines(tmp_path / "qa/nq" / f"{split}.jsonl", questions(count, f"nq {split}"))
    for split in ("train", "dev"):
        rows = [row | {"metadata": {"type": "bridge"}} for row in questions(2, f"hotpotqa {split}")]
        write_lines(tmp_path / "qa/hotpotqa" / f"{split}.jsonl", rows)
    write_lines(tmp_path / "qa/strategyqa/train.jsonl", questions(1, "strategyqa train"))
    table = tmp_path / "qa/bamboogle/Bamboogle Prerelease - Sheet1.csv"
    table.parent.mkdir()
    table.write_text("Question,Answer\nWho?,Me\n")
    return tmp_path


def process(folder: Path, script: str, *arguments: object) -> int:
    """The exit status of a script of data_process/ that reads the folder qa/ and writes to o/."""
    folders = ("--local_dir", folder / "o", "--input_dir", folder / "qa")
    return run_script(f"data_process/{script}.py", *folders, *arguments)


def rows_of(folder: Path, split: str) -> list[dict]:
    return pq.read_table(folder / f"o/{split}.parquet").to_pylist()


def schema_of(table: pa.Table) -> dict[str, pa.DataType]:
    return dict(zip(table.schema.names, table.schema.types, strict=True))


def test_nq_search_writes_both_files_in_the_published_schema(folder: Path) -> None:
    assert process(folder, "nq_search") == 0
    table = pq.read_table(folder / "o/train.parquet")
    assert schema_of(table) == SCHEMA
    assert [row["question"] for row in rows_of(folder, "test")] == ["nq test 0?", "nq test 1?"]
    assert table.to_pylist()[2] == {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": load_template("search_r1").text.replace("{question}", "nq train 2?")}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["answer 2", "other"]}},
        "extra_info": {"split": "train", "index": 2},
        "id": "nq train_2",
        "question": "nq train 2?",
        "golden_answers": ["answer 2", "other"],
        "metadata": None,
    }


def test_the_file_names_its_template(folder: Path) -> None:
    for script, name in (("nq_search", "search_r1"), ("nq", "r1")):
        process(folder, script)
        metadata = pq.read_metadata(folder / "o/test.parquet").metadata
        assert metadata[b"search_r1.template"] == name.encode()
        assert metadata[b"search_r1.template_fingerprint"] == load_template(name).fingerprint.encode()


def test_a_template_of_ones_own_with_a_system_message(folder: Path) -> None:
    template = folder / "own.txt"
    template.write_text("---\nsystem: Be brief.\n---\nQ: {question}\n")
    assert process(folder, "nq_search", "--splits", "test", "--template_type", template) == 0
    assert rows_of(folder, "test")[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: nq test 0?\n"},
    ]


def test_merge_for_training_keeps_the_order_of_the_list(folder: Path) -> None:
    assert process(folder, TRAIN_MERGE, "--data_sources", "hotpotqa,nq") == 0
    rows = rows_of(folder, "train")
    assert [(row["data_source"], row["extra_info"]["index"], row["id"]) for row in rows] == [
        *(("hotpotqa", index, f"hotpotqa train_{index}") for index in range(2)),
        *(("nq", index, f"nq train_{index}") for index in range(3)),
    ]
    assert [row["metadata"] for row in rows] == ['{"type": "bridge"}'] * 2 + [None] * 3
    assert os.listdir(folder / "o") == ["train.parquet"]


def test_merge_for_tests_takes_test_then_dev_then_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert process(folder, TEST_MERGE, "--data_sources", "nq,hotpotqa,strategyqa,bamboogle") == 0
    rows = rows_of(folder, "test")
    origins = [*["nq test"] * 2, *["hotpotqa dev"] * 2, "strategyqa train", "test"]
    assert [row["id"].split("_")[0] for row in rows] == origins
    assert {row["extra_info"]["split"] for row in rows} == {"test"}
    parts = [
        *("2 of nq from test.jsonl", "2 of hotpotqa from dev.jsonl", "1 of strategyqa from train.jsonl"),
        "1 of bamboogle from Bamboogle Prerelease - Sheet1.csv",
    ]
    assert f"6 prompts ({', '.join(parts)})" in capsys.readouterr().out


def test_limit_is_for_each_set(folder: Path) -> None:
    assert process(folder, TEST_MERGE, "--data_sources", "nq,hotpotqa", "--limit", 1) == 0
    assert [row["id"] for row in rows_of(folder, "test")] == ["nq test_0", "hotpotqa dev_0"]


def test_more_rows_than_are_written_at_once(folder: Path) -> None:
    write_lines(folder / "qa/nq/train.jsonl", questions(9000, "many"))
    process(folder, "nq", "--splits", "train")
    assert [row["extra_info"]["index"] for row in rows_of(folder, "train")] == list(range(9000))
    assert pq.read_metadata(folder / "o/train.parquet").num_row_groups == 3


def test_a_packed_file_is_read(folder: Path) -> None:
    plain = folder / "qa/nq/test.jsonl"
    (folder / "qa/nq/test.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    process(folder, "nq", "--splits", "test")
    assert len(rows_of(folder, "test")) == 2


def test_a_missing_split_is_named_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qa/nq/test.jsonl").unlink()
    assert process(folder, "nq_search") == 2
    said = capsys.readouterr().err
    assert f"{folder}/qa/nq: the test split is not there; place test.jsonl in this folder" in said
    assert "or the original NQ-open.dev.jsonl" in said
    assert not (folder / "o").exists(), "dev.jsonl must not stand in for it, and train must wait for the rest"
    assert process(folder, "nq_search", "--splits", "train") == 0
    assert os.listdir(folder / "o") == ["train.parquet"]


def test_without_a_folder_and_a_network_it_says_what_to_place(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run_script("data_process/nq.py", "--local_dir", tmp_path / "o") == 2
    said = capsys.readouterr().err
    assert "resolve/main/nq/train.jsonl elsewhere, place it as DIR/nq/train.jsonl and pass --input_dir DIR" in said


def test_an_error_leaves_an_earlier_file_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert process(folder, TEST_MERGE, "--data_sources", "nq,hotpotqa") == 0
    before = (folder / "o/test.parquet").read_bytes()
    write_lines(folder / "qa/hotpotqa/dev.jsonl", [*questions(1), {"id": "x", "question": "", "golden_answers": ["a"]}])
    assert process(folder, TEST_MERGE, "--data_sources", "nq,hotpotqa") == 2
    assert "hotpotqa/dev.jsonl:2: the question is '', not a text" in capsys.readouterr().err
    assert (folder / "o/test.parquet").read_bytes() == before
    assert os.listdir(folder / "o") == ["test.parquet"]


def test_skipped_rows_are_listed_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = questions(3)
    write_lines(folder / "qa/nq/test.jsonl", [rows[0], "{", rows[1], rows[1], rows[2]])
    assert process(folder, "nq", "--splits", "test", "--skip_bad_rows") == 0
    said = capsys.readouterr()
    assert "2 rows left out" in said.out
    assert [line.partition("nq/test.jsonl")[2][:2] for line in said.err.splitlines()] == [":2", ":4"]
    found = [(row["id"], row["extra_info"]["index"]) for row in rows_of(folder, "test")]
    assert found == [("q_0", 0), ("q_1", 2), ("q_2", 4)], "an index does not depend on what was left out"


def test_the_same_id_in_two_sets_is_no_duplicate(folder: Path) -> None:
    for name in ("nq/test", "hotpotqa/dev"):
        write_lines(folder / "qa" / f"{name}.jsonl", questions(2))
    assert process(folder, TEST_MERGE, "--data_sources", "nq,hotpotqa") == 0


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (TEST_MERGE, ("--data_sources", "nq,hotpot"), r"there is no set 'hotpot' in .*did you mean hotpotqa\?"),
        (TEST_MERGE, ("--data_sources", "nq,nq"), "each once"),
        (TEST_MERGE, ("--data_sources", ","), "has to name some of nq, triviaqa"),
        (TRAIN_MERGE, ("--data_sources", "bamboogle"), "bamboogle has no train split, only test"),
        (TEST_MERGE, ("--template_type", "gone"), "no template 'gone'"),
        (TEST_MERGE, ("--template_type", "rag"), "has a place for retrieved passages, which only nq_rag.py gives"),
        ("nq_rag", ("--template_type", "r1"), "has no place for retrieved passages"),
        ("nq", ("--splits", "train,dev"), "--splits 'train,dev' has to be some of train,test"),
        ("nq", ("--hdfs_dir", "/user/x"), "--hdfs_dir needs the program hdfs"),
    ],
)
def test_what_is_refused(folder: Path, script: str, arguments: tuple, message: str, capsys) -> None:
    assert process(folder, script, *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (folder / "o").exists()


def test_an_output_that_cannot_be_written_and_an_interruption(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "o").touch()
    assert process(folder, "nq_search") == 1
    said = capsys.readouterr().err
    assert f"error: {folder}/o/train.parquet could not be written: a file has the name of its folder" in said

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    (folder / "o").unlink()
    monkeypatch.setattr(build, "prompt_row", interrupt)
    assert process(folder, "nq_search") == 130
    assert "interrupted" in capsys.readouterr().err and not list((folder / "o").iterdir())


def test_the_files_are_copied_to_hdfs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A client that knows `dfs -mkdir -p` and `dfs -put -f`, and keeps its files in a local folder."""
    client = folder / "bin/hdfs"
    client.parent.mkdir()
    client.write_text(
        "#!/usr/bin/env bash\nset -e\n"
        '[[ $1 = dfs ]]; case "$2" in -mkdir) mkdir -p "$4" ;; -put) [[ $3 = -f ]]; cp "${@:4}" ;; *) exit 2 ;; esac\n'
    )
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(client.parent), prepend=os.pathsep)
    assert process(folder, "nq", "--hdfs_dir", folder / "remote/nq") == 0
    for name in ("train.parquet", "test.parquet"):
        assert (folder / "remote/nq" / name).read_bytes() == (folder / "o" / name).read_bytes()
    (folder / "file").touch()
    assert process(folder, "nq", "--hdfs_dir", folder / "file/x") == 2
    assert "hdfs dfs -mkdir to" in capsys.readouterr().err


def test_both_published_files_by_one_script(folder: Path) -> None:
    for name, split in (("triviaqa", "test"), ("popqa", "test"), ("2wikimultihopqa", "dev"), ("musique", "dev")):
        write_lines(folder / "qa" / name / f"{split}.jsonl", questions(1, name))
    script = ("bash", "scripts/nq_hotpotqa/data_process.sh", "--input_dir", str(folder / "qa"))
    for call in Checkout(folder).rehearse(Command("", script, {"WORK_DIR": str(folder)})):
        assert call.words[0] == "python3"
        assert run_script(call.words[1].removeprefix("scripts/"), *call.arguments) == 0
    made = [pq.read_table(folder / f"data/nq_hotpotqa_train/{split}.parquet") for split in ("train", "test")]
    sources = [table["data_source"].to_pylist() for table in made]
    assert sources[0] == ["nq"] * 3 + ["hotpotqa"] * 2
    assert list(dict.fromkeys(sources[1])) == [
        *("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    ]


REAL = {"nq": ("test", 2400), "hotpotqa": ("dev", 5000), "2wikimultihopqa": ("dev", 350), "bamboogle": ("test", 125)}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompt file of real question files."""
    if not REAL_QUESTIONS.is_dir():
        pytest.skip("the folder of real questions is absent")
    folder = tmp_path_factory.mktemp("real")
    (folder / "qa").symlink_to(REAL_QUESTIONS)
    assert process(folder, TEST_MERGE, "--data_sources", ",".join(REAL)) == 0
    return folder / "o/test.parquet"


def source() -> list[tuple[str, int, dict[str, Any]]]:
    """(set, number in the file, row) of the real files, read without the project's code."""
    lines = {name: (REAL_QUESTIONS / name / f"{split}.jsonl").read_text() for name, (split, _) in REAL.items()}
    return [(name, i, json.loads(line)) for name in REAL for i, line in enumerate(lines[name].splitlines())]


def test_no_real_question_is_lost_or_altered(prompts: Path) -> None:
    table = pq.read_table(prompts)
    assert schema_of(table) == SCHEMA
    counted = table.group_by("data_source", use_threads=False).aggregate([("id", "count")]).to_pydict()
    counts = {name: count for name, (_, count) in REAL.items()}
    assert dict(zip(counted["data_source"], counted["id_count"], strict=True)) == counts
    before, after = load_template("search_r1").text.split("{question}")
    changed = 0
    for row, (name, number, original) in zip(table.to_pylist(), source(), strict=True):
        question = original["question"].strip()
        changed += not question.endswith("?")
        assert row["question"] == question + "?" * (not question.endswith("?"))
        assert row["prompt"] == [{"role": "user", "content": before + row["question"] + after}]
        assert row["golden_answers"] == original["golden_answers"] == row["reward_model"]["ground_truth"]["target"]
        assert (row["data_source"], row["id"]) == (name, original["id"])
        assert row["extra_info"] == {"split": "test", "index": number}
        assert (row["metadata"] and json.loads(row["metadata"])) == original.get("metadata")
    assert changed > 2000, "the questions of NQ have no question mark"


def test_training_loads_real_questions(prompts: Path, tmp_path: Path, byte_tokenizer) -> None:
    pq.write_table(pq.read_table(prompts).slice(2000, 1000), tmp_path / "part.parquet")
    loaded = PromptSource(str(tmp_path / "part.parquet"), byte_tokenizer, max_start_length=2048, shuffle=False)
    assert len(loaded) == 1000
    prompt = loaded.next(1000)[-1]
    assert prompt.data_source == "hotpotqa" and prompt.row["extra_info"]["index"] == 599
    assert byte_tokenizer.decode(prompt.ids) == prompt.row["prompt"][0]["content"]
