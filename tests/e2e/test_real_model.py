"""The recipe of a pretrained model on real passages, rehearsed; what it stores against transformers in float32."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_world import ENV, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.tracking.trajectory_store import read_trajectories

DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not DATA.is_dir(), reason="the folder of real questions and passages is absent"),
]


@pytest.mark.parametrize("kind", ["tags", "chat"])
def test_the_recipe_of_a_real_model(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed: pip install -e '.[gguf]'")
    command = ["bash", "scripts/recipes/smollm2.sh", "--small", "--output_dir", str(tmp_path / "run")]
    command += ["--corpus", str(DATA / "wiki-mini.jsonl.gz"), *(["--chat"] if kind == "chat" else [])]
    command += ["--questions", str(DATA / "qa" / "nq" / "test.jsonl"), str(DATA / "qa" / "hotpotqa" / "dev.jsonl")]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=2900, check=False)
    if "could not fetch" in done.stderr:
        pytest.skip("the package index cannot be reached, or has not the model")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert len(re.findall(r"^\| direct \|", done.stdout, re.MULTILINE)) >= 2, "both comparisons"
    run = tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for step in (1, 2, 3):
        rows = read_trajectories(run / "rl" / "trajectories" / f"train_step_{step}.parquet")
        assert len(rows) == 16 and all(row["status"] != "failed" for row in rows)
        for row in rows:
            check_segments(row, tokenizer)
    # RL's first trajectories are those of the warm start's weights, which sampler and trainer round to bfloat16.
    model = AutoModelForCausalLM.from_pretrained(run / "warm_start" / "global_step_3", dtype=torch.bfloat16).float()
    first = read_trajectories(run / "rl" / "trajectories" / "train_step_1.parquet")
    for column in ("log_probs", "old_log_probs"):
        off = torch.cat([differences(model, row, column) for row in first])
        assert off.mean() < 0.05 and off.max() < 1, f"{column}: {off.mean()}, at most {off.max()}; bfloat16"


def check_segments(row: dict[str, Any], tokenizer: Any) -> None:
    """What the policy wrote is trained on, and only that; the texts are those of the ids."""
    at = 0
    for segment in row["segments"]:
        ids = row["ids"][at : at + segment["num_tokens"]]
        mask = row["loss_mask"][at : at + segment["num_tokens"]]
        assert set(mask) <= {segment["source"] == "policy"}
        assert tokenizer.decode(ids) == segment["text"]
        at += segment["num_tokens"]
    assert at == len(row["ids"]) == len(row["loss_mask"]) and any(row["loss_mask"])


def differences(model: Any, row: dict[str, Any], column: str) -> torch.Tensor:
    """Of the stored log-probs of the policy's tokens from those of the model, absolute, in nats."""
    with torch.inference_mode():
        logits = model(torch.tensor([row["ids"]])).logits[0, :-1]
    log_probs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row["ids"][1:])[:, None])[:, 0]
    stored = [value for value, is_policy in zip(row[column], row["loss_mask"], strict=True) if is_policy]
    return (torch.tensor(stored) - log_probs[torch.tensor(row["loss_mask"][1:])]).abs()
