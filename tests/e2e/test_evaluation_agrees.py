"""One policy, three ways to ask it: validation in training's loop, an engine in this process, a model server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_world import ENV, ROOT, free_port, run, wait_until_up

from search_r1.rewards.metrics import exact_match
from verl.tracking.trajectory_store import read_trajectories

NUM_QUESTIONS = 24
RIGHT = slice(0, None, 2)
"""Questions to which the policy has learned the gold answer; to the others it gives those of one another."""

LESSONS = 60

# As verl/rollout/engine.py sets up its engine on CPU.
SERVER_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHDYNAMO_DISABLE": "1",
}
SERVER_FLAGS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill")
SERVER_LIMITS = ("--max-model-len", "1024", "--max-num-batched-tokens", "4096", "--max-num-seqs", "64")


@pytest.fixture(scope="module")
def questions(tinywiki: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "validation.parquet"
    pq.write_table(pq.read_table(tinywiki / "validation.parquet").slice(0, NUM_QUESTIONS), path)
    return path


@pytest.fixture(scope="module")
def answering(questions: Path, tinywiki: Path, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned by heart what to look up and to answer: the others know few answers, if any."""
    folder, rows = tmp_path_factory.mktemp("answering"), pq.read_table(questions).to_pylist()
    contents = (json.loads(line)["contents"] for line in (tinywiki / "corpus.jsonl").read_text().splitlines())
    passages = {
        title.strip('"'): f"(Title: {title}) {text}" for title, _, text in (c.partition("\n") for c in contents)
    }
    answers = [row["reward_model"]["ground_truth"]["target"][0] for row in rows]
    taught = [*answers[2:], *answers[:2]]
    taught[RIGHT] = answers[RIGHT]
    lessons = [demonstration(row, passages, answer) for row, answer in zip(rows, taught, strict=True)]
    pq.write_table(pa.Table.from_pylist(lessons), folder / "lessons.parquet")
    run(
        *("-m", "verl.trainer.sft", "--config-name", "tinywiki_sft", f"data.train_files={folder / 'lessons.parquet'}"),
        *(f"model.path={policy}", f"trainer.default_local_dir={folder}", f"data.train_batch_size={NUM_QUESTIONS}"),
        *("data.lm_fraction=0", f"trainer.total_training_steps={LESSONS}", "optim.lr=3e-3"),
    )
    return folder / f"global_step_{LESSONS}"


def demonstration(row: dict[str, Any], passages: dict[str, str], answer: str) -> dict[str, Any]:
    subject = row["extra_info"]["chain"][0]
    turns = [
        ("prompt", row["prompt"][0]["content"]),
        ("policy", f"<think> Look up {subject}</think><search> {subject}</search>"),
        ("environment", f"\n\n<information>Doc 1{passages[subject]}</information>\n\n"),
        ("policy", f"<think> {answer}</think><answer> {answer}</answer>"),
    ]
    return {"segments": [{"source": source, "text": text} for source, text in turns], "phase": "policy"}


@pytest.fixture(scope="module")
def model_server(answering: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of vLLM's own server with the policy, starting."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(answering)]
    address = ("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port))
    server = subprocess.Popen([*command, *address, *SERVER_FLAGS, *SERVER_LIMITS], cwd=ROOT, env=ENV | SERVER_ENV)
    yield f"http://127.0.0.1:{port}", server
    server.terminate()
    server.wait(timeout=120)


@pytest.fixture(scope="module")
def validated(
    model_server: object, questions: Path, answering: Path, tinywiki_url: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What `+trainer.val_only=true` stored, while the model server starts."""
    folder = tmp_path_factory.mktemp("val_only")
    run(
        *("-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", "+trainer.val_only=true", "trainer.logger=[]"),
        *(f"data.train_files={questions}", f"data.val_files={questions}", f"actor_rollout_ref.model.path={answering}"),
        *(f"retriever.url={tinywiki_url}", f"trainer.default_local_dir={folder}"),
    )
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"val/test_score/tinywiki_1hop", "val/test_score/tinywiki_2hop", "val/test_score/mean"} <= metrics[0].keys()
    return read_trajectories(folder / "trajectories" / "val_step_0.parquet")


def answer_of(played: dict[str, Any]) -> str | None:
    return next((event["answer"] for event in played["events"] if event["action"] == "answer"), None)


def evaluated(folder: Path, *arguments: str) -> tuple[list[dict], list[dict], dict]:
    """Records, trajectories and results."""
    run("-m", "search_r1.evaluation", "--output_dir", str(folder), "--config-name", "tinywiki", *arguments)
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    results = json.loads((folder / "results.json").read_text())
    return records, read_trajectories(folder / "trajectories.parquet"), results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ways_give_the_same_answers_question_by_question(
    validated: list[dict[str, Any]],
    questions: Path,
    model_server: tuple[str, subprocess.Popen[bytes]],
    answering: Path,
    tinywiki_url: str,
    tmp_path: Path,
) -> None:
    data = ("--data", str(questions), "--retriever_url", tinywiki_url)
    records, played, results = evaluated(tmp_path / "engine", "--model", str(answering), *data)
    url, process = model_server
    wait_until_up(process, f"{url}/health")
    server = ("--server", url, "--served_model", "policy", "--tokenizer", str(answering))
    served_records, served, served_results = evaluated(tmp_path / "server", *server, *data)

    assert [row["ids"] for row in played] == [row["ids"] for row in validated]
    assert [row["ids"] for row in served] == [row["ids"] for row in validated]
    assert [row["log_probs"] for row in served] == [row["log_probs"] for row in played]
    answers = [answer_of(row) for row in validated]
    assert [record["answer"] for record in records] == [record["answer"] for record in served_records] == answers
    assert len({*answers} - {None}) > NUM_QUESTIONS // 2 and any(row["num_searches"] for row in validated)

    right = [
        answer is not None and exact_match(answer, record["golden_answers"])
        for answer, record in zip(answers, records, strict=True)
    ]
    assert [record["metrics"]["em"] for record in records] == [float(one) for one in right]
    assert results["micro"]["em"] == served_results["micro"]["em"]
    assert results["micro"]["em"]["mean"] == pytest.approx(sum(right) / NUM_QUESTIONS)
    assert 0.25 < results["micro"]["em"]["mean"] < 1
    assert results["sets"].keys() == {"tinywiki_1hop", "tinywiki_2hop"}
    assert results["run"]["exact_token_ids"] and served_results["run"]["exact_token_ids"]
    own_gold = [(row["reward"], answer_of(row), row["ground_truth"]["target"]) for row in validated]
    assert all(reward == float(exact_match(answer or "", gold)) for reward, answer, gold in own_gold)
