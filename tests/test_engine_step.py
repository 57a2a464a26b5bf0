"""The script that measures a step of the actor on one GPU, tried on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FEW = (
    *(
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n_agent=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
    *("actor_rollout_ref.actor.ppo_micro_batch_size=1", "actor_rollout_ref.rollout.log_prob_micro_batch_size=1"),
    *("data.max_prompt_length=64", "data.max_obs_length=16", "data.max_start_length=16", "data.max_response_length=16"),
)


@pytest.mark.slow
def test_a_step_is_measured_pass_by_pass(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "gpu" / "engine_step.py", "--device", "cpu", "--shape", "tiny"]
    found = subprocess.run(
        [*command, "--rounds", "1", "--without_liger", *FEW],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert found.returncode == 0, found.stderr
    assert "SKIP  no layer is fused: that needs CUDA" in found.stdout
    lines = found.stdout.splitlines()
    assert [line[:4] for line in lines if line.startswith(("PASS", "FAIL"))] == ["PASS", "PASS"]
    table = lines[lines.index("") + 1 :]
    assert [re.split(r" {2,}", line)[0] for line in table[2:]] == [
        "log-probs",
        "update",
        "anchor follows",
        "weight sync",
    ]
    assert not list(tmp_path.iterdir()), "nothing is left behind"
