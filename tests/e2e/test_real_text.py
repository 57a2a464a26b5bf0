"""The published command on real questions and real Wikipedia passages, one step, then the same with a dense index."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT, run
from transformers import AutoConfig

from verl.tracking.trajectory_store import read_trajectories

DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not DATA.is_dir(), reason="the folder of real questions and passages is absent"),
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real files have no training splits: the test questions are trained on."""
    folder = tmp_path_factory.mktemp("questions")
    for name, file in (("nq", "test.jsonl"), ("hotpotqa", "dev.jsonl")):
        (folder / "qa" / name).mkdir(parents=True)
        (folder / "qa" / name / "train.jsonl").symlink_to(DATA / "qa" / name / file)
    for name, source, limit in (("train", folder / "qa", "64"), ("test", DATA / "qa", "8")):
        run(
            *(f"scripts/data_process/qa_search_{name}_merge.py", "--data_sources", "nq,hotpotqa"),
            *("--local_dir", str(folder), "--input_dir", str(source), "--limit", limit),
        )
    return folder


def test_published_command_on_real_text(
    questions: Path, policy: Path, start_retriever: Callable[..., str], tmp_path: Path
) -> None:
    url = start_retriever(DATA / "wiki-mini.jsonl.gz")
    name = f"real_text_{os.getpid()}"
    environment = ENV | {"DATA_DIR": str(questions), "BASE_MODEL": str(policy), "EXPERIMENT_NAME": name}
    overrides = {
        "retriever.url": url,
        "data.train_batch_size": 8,
        "actor_rollout_ref.rollout.n_agent": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.rollout.dtype": "float32",
        "trainer.total_training_steps": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": tmp_path / "run",
    }
    command = ["bash", "train_grpo_ema_pg.sh", *(f"{key}={value}" for key, value in overrides.items())]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    (ROOT / f"{name}.log").unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    rows = read_trajectories(tmp_path / "run" / "trajectories" / "train_step_1.parquet")
    assert len(rows) == 16 and all(row["status"] != "failed" for row in rows)
    vocabulary = AutoConfig.from_pretrained(policy).vocab_size
    assert all(0 <= token < vocabulary for row in rows for token in row["ids"])
    observations = [s["text"] for row in rows for s in row["segments"] if s["source"] == "environment"]
    assert all(text.count("<information>") == text.count("</information>") for text in observations)
    assert (tmp_path / "run" / "report.md").is_file()
