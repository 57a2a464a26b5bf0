"""Real question files: every question and answer of the source is in the prompt file, and training loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from data_scripts import REAL_QUESTIONS, run_script
from test_qa_prompts import SCHEMA, TEST_MERGE

from search_r1.llm_agent.templates import load_template
from verl.data.prompts import PromptSource

pytestmark = pytest.mark.skipif(not REAL_QUESTIONS.is_dir(), reason="the folder of real questions is absent")

FILES = {"nq": "test", "hotpotqa": "dev", "2wikimultihopqa": "dev", "bamboogle": "test"}
COUNTS = {"nq": 2400, "hotpotqa": 5000, "2wikimultihopqa": 350, "bamboogle": 125}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    arguments = ("--local_dir", folder, "--input_dir", REAL_QUESTIONS, "--data_sources", ",".join(COUNTS))
    assert run_script(TEST_MERGE, *arguments) == 0
    return folder / "test.parquet"


@pytest.fixture(scope="module")
def source() -> list[tuple[str, int, dict[str, Any]]]:
    """(set, number in the file, row), read without the project's code."""
    lines = {name: (REAL_QUESTIONS / name / f"{split}.jsonl").read_text().splitlines() for name, split in FILES.items()}
    return [(name, number, json.loads(line)) for name in FILES for number, line in enumerate(lines[name])]


def test_schema_and_counts(prompts: Path) -> None:
    table = pq.read_table(prompts)
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == SCHEMA
    counted = table.group_by("data_source", use_threads=False).aggregate([("id", "count")]).to_pydict()
    assert dict(zip(counted["data_source"], counted["id_count"], strict=True)) == COUNTS


def test_no_question_is_lost_or_altered(prompts: Path, source: list) -> None:
    rows = pq.read_table(prompts).to_pylist()
    before, after = load_template("search_r1").text.split("{question}")
    assert len(rows) == len(source)
    changed = 0
    for row, (name, number, original) in zip(rows, source, strict=True):
        question = original["question"].strip()
        changed += not question.endswith("?")
        assert row["question"] == question + "?" * (not question.endswith("?"))
        assert row["prompt"] == [{"role": "user", "content": before + row["question"] + after}]
        assert row["golden_answers"] == original["golden_answers"] == row["reward_model"]["ground_truth"]["target"]
        assert (row["data_source"], row["id"]) == (name, original["id"])
        assert row["extra_info"] == {"split": "test", "index": number}
        assert (row["metadata"] and json.loads(row["metadata"])) == original.get("metadata")
    assert changed > 2000, "the questions of NQ have no question mark"


def test_training_loads_it(prompts: Path, source: list, byte_tokenizer) -> None:
    loaded = PromptSource(str(prompts), byte_tokenizer, max_start_length=2048, shuffle=False)
    assert len(loaded) == len(source)
    prompt = loaded.next(3000)[-1]
    assert prompt.data_source == "hotpotqa" and prompt.row["extra_info"]["index"] == 599
    assert byte_tokenizer.decode(prompt.ids) == prompt.row["prompt"][0]["content"]
