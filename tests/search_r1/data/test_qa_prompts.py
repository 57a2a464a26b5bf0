"""From question files to prompt files by the published scripts: the schema, the order, and what is refused."""

from __future__ import annotations

import gzip
import os
import re
import stat
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_scripts import ROOT, questions, run_script, write_lines

from search_r1.llm_agent.templates import load_template

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
TRAIN_MERGE, TEST_MERGE = "data_process/qa_search_train_merge.py", "data_process/qa_search_test_merge.py"


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


def rows_of(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_nq_search_writes_both_files_in_the_published_schema(folder: Path) -> None:
    assert run_script("data_process/nq_search.py", "--local_dir", folder / "out", "--input_dir", folder / "qa") == 0
    table = pq.read_table(folder / "out/train.parquet")
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == SCHEMA
    assert [row["question"] for row in rows_of(folder / "out/test.parquet")] == ["nq test 0?", "nq test 1?"]
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
        run_script(f"data_process/{script}.py", "--local_dir", folder / "out", "--input_dir", folder / "qa")
        metadata = pq.read_metadata(folder / "out/test.parquet").metadata
        assert metadata[b"search_r1.template"] == name.encode()
        assert metadata[b"search_r1.template_fingerprint"] == load_template(name).fingerprint.encode()


def test_a_template_of_ones_own_with_a_system_message(folder: Path) -> None:
    template = folder / "own.txt"
    template.write_text("---\nsystem: Be brief.\n---\nQ: {question}\n")
    arguments = ("--local_dir", folder / "out", "--input_dir", folder / "qa", "--splits", "test")
    assert run_script("data_process/nq_search.py", *arguments, "--template_type", template) == 0
    assert rows_of(folder / "out/test.parquet")[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: nq test 0?\n"},
    ]


def test_merge_for_training_keeps_the_order_of_the_list(folder: Path) -> None:
    arguments = ("--local_dir", folder / "out", "--input_dir", folder / "qa", "--data_sources", "hotpotqa,nq")
    assert run_script(TRAIN_MERGE, *arguments) == 0
    rows = rows_of(folder / "out/train.parquet")
    assert [(row["data_source"], row["extra_info"]["index"], row["id"]) for row in rows] == [
        ("hotpotqa", 0, "hotpotqa train_0"),
        ("hotpotqa", 1, "hotpotqa train_1"),
        ("nq", 0, "nq train_0"),
        ("nq", 1, "nq train_1"),
        ("nq", 2, "nq train_2"),
    ]
    assert [row["metadata"] for row in rows] == ['{"type": "bridge"}'] * 2 + [None] * 3
    assert os.listdir(folder / "out") == ["train.parquet"]


def test_merge_for_tests_takes_test_then_dev_then_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = "nq,hotpotqa,strategyqa,bamboogle"
    assert (
        run_script(TEST_MERGE, "--local_dir", folder / "o", "--input_dir", folder / "qa", "--data_sources", sets) == 0
    )
    rows = rows_of(folder / "o/test.parquet")
    assert [row["id"].split("_")[0] for row in rows] == [
        *["nq test"] * 2,
        *["hotpotqa dev"] * 2,
        "strategyqa train",
        "test",
    ]
    assert {row["extra_info"]["split"] for row in rows} == {"test"}
    parts = [
        *("2 of nq from test.jsonl", "2 of hotpotqa from dev.jsonl", "1 of strategyqa from train.jsonl"),
        "1 of bamboogle from Bamboogle Prerelease - Sheet1.csv",
    ]
    assert f"6 prompts ({', '.join(parts)})" in capsys.readouterr().out


def test_limit_is_for_each_set(folder: Path) -> None:
    arguments = (
        "--local_dir",
        folder / "o",
        "--input_dir",
        folder / "qa",
        "--data_sources",
        "nq,hotpotqa",
        "--limit",
        1,
    )
    assert run_script(TEST_MERGE, *arguments) == 0
    assert [row["id"] for row in rows_of(folder / "o/test.parquet")] == ["nq test_0", "hotpotqa dev_0"]


def test_more_rows_than_are_written_at_once(folder: Path) -> None:
    write_lines(folder / "qa/nq/train.jsonl", questions(9000, "many"))
    run_script("data_process/nq.py", "--local_dir", folder / "o", "--input_dir", folder / "qa", "--splits", "train")
    assert [row["extra_info"]["index"] for row in rows_of(folder / "o/train.parquet")] == list(range(9000))
    assert pq.read_metadata(folder / "o/train.parquet").num_row_groups == 3


def test_a_packed_file_is_read(folder: Path) -> None:
    plain = folder / "qa/nq/test.jsonl"
    (folder / "qa/nq/test.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    run_script("data_process/nq.py", "--local_dir", folder / "o", "--input_dir", folder / "qa", "--splits", "test")
    assert len(rows_of(folder / "o/test.parquet")) == 2


def test_a_missing_split_is_named_and_nothing_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "qa/nq/test.jsonl").unlink()
    assert run_script("data_process/nq_search.py", "--local_dir", folder / "o", "--input_dir", folder / "qa") == 1
    said = capsys.readouterr().err
    assert f"{folder}/qa/nq: the test split is not there; place test.jsonl in this folder" in said
    assert "or the original NQ-open.dev.jsonl" in said
    assert not (folder / "o").exists(), "dev.jsonl must not stand in for it, and train must wait for the rest"
    arguments = ("--local_dir", folder / "o", "--input_dir", folder / "qa", "--splits", "train")
    assert run_script("data_process/nq_search.py", *arguments) == 0
    assert os.listdir(folder / "o") == ["train.parquet"]


def test_without_a_folder_and_a_network_it_says_what_to_place(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert run_script("data_process/nq.py", "--local_dir", tmp_path / "o") == 1
    said = capsys.readouterr().err
    assert "resolve/main/nq/train.jsonl elsewhere, place it as DIR/nq/train.jsonl and pass --input_dir DIR" in said


def test_an_error_leaves_an_earlier_file_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--local_dir", folder / "o", "--input_dir", folder / "qa", "--data_sources", "nq,hotpotqa")
    assert run_script(TEST_MERGE, *arguments) == 0
    before = (folder / "o/test.parquet").read_bytes()
    write_lines(folder / "qa/hotpotqa/dev.jsonl", [*questions(1), {"id": "x", "question": "", "golden_answers": ["a"]}])
    assert run_script(TEST_MERGE, *arguments) == 1
    assert "hotpotqa/dev.jsonl:2: the question is '', not a text" in capsys.readouterr().err
    assert (folder / "o/test.parquet").read_bytes() == before
    assert os.listdir(folder / "o") == ["test.parquet"]


def test_skipped_rows_are_listed_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = questions(3)
    write_lines(folder / "qa/nq/test.jsonl", [rows[0], "{", rows[1], rows[1], rows[2]])
    arguments = ("--local_dir", folder / "o", "--input_dir", folder / "qa", "--splits", "test", "--skip_bad_rows")
    assert run_script("data_process/nq.py", *arguments) == 0
    said = capsys.readouterr()
    assert "2 rows left out" in said.out
    assert [line.partition("nq/test.jsonl")[2][:2] for line in said.err.splitlines()] == [":2", ":4"]
    found = [(row["id"], row["extra_info"]["index"]) for row in rows_of(folder / "o/test.parquet")]
    assert found == [("q_0", 0), ("q_1", 2), ("q_2", 4)], "an index does not depend on what was left out"


def test_the_same_id_in_two_sets_is_no_duplicate(folder: Path) -> None:
    for name in ("nq/test", "hotpotqa/dev"):
        write_lines(folder / "qa" / f"{name}.jsonl", questions(2))
    arguments = ("--local_dir", folder / "o", "--input_dir", folder / "qa", "--data_sources", "nq,hotpotqa")
    assert run_script(TEST_MERGE, *arguments) == 0


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (TEST_MERGE, ("--data_sources", "nq,hotpot"), r"there is no set 'hotpot' in .*did you mean hotpotqa\?"),
        (TEST_MERGE, ("--data_sources", "nq,nq"), "each once"),
        (TEST_MERGE, ("--data_sources", ","), "has to name some of nq, triviaqa"),
        (TRAIN_MERGE, ("--data_sources", "bamboogle"), "bamboogle has no train split, only test"),
        (TEST_MERGE, ("--template_type", "gone"), "no template 'gone'"),
        (TEST_MERGE, ("--template_type", "rag"), "has a place for retrieved passages, which only nq_rag.py gives"),
        ("data_process/nq_rag.py", ("--template_type", "r1"), "has no place for retrieved passages"),
        ("data_process/nq.py", ("--splits", "train,dev"), "--splits 'train,dev' has to be some of train,test"),
        ("data_process/nq.py", ("--hdfs_dir", "/user/x"), "--hdfs_dir needs the program hdfs"),
    ],
)
def test_what_is_refused(folder: Path, script: str, arguments: tuple, message: str, capsys) -> None:
    assert run_script(script, "--local_dir", folder / "o", "--input_dir", folder / "qa", *arguments) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (folder / "o").exists()


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
    arguments = ("--local_dir", folder / "o", "--input_dir", folder / "qa", "--hdfs_dir", folder / "remote/nq")
    assert run_script("data_process/nq.py", *arguments) == 0
    for name in ("train.parquet", "test.parquet"):
        assert (folder / "remote/nq" / name).read_bytes() == (folder / "o" / name).read_bytes()
    (folder / "file").touch()
    assert run_script("data_process/nq.py", *arguments[:-1], folder / "file/x") == 1
    assert "hdfs dfs -mkdir to" in capsys.readouterr().err


def test_both_published_files_by_one_script(folder: Path) -> None:
    for name, split in (("triviaqa", "test"), ("popqa", "test"), ("2wikimultihopqa", "dev"), ("musique", "dev")):
        write_lines(folder / "qa" / name / f"{split}.jsonl", questions(1, name))
    subprocess.run(
        ["bash", "scripts/nq_hotpotqa/data_process.sh", "--input_dir", str(folder / "qa")],
        cwd=ROOT,
        env=os.environ | {"WORK_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=120,
    )
    made = folder / "data/nq_hotpotqa_train"
    sources = [[row["data_source"] for row in rows_of(made / f"{name}.parquet")] for name in ("train", "test")]
    assert sources[0] == ["nq"] * 3 + ["hotpotqa"] * 2
    assert list(dict.fromkeys(sources[1])) == [
        *("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    ]
