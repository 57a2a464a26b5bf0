"""Which devices the roles of a run are given, by Ray itself on GPUs that it is told to have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_world import ENV

PROBE = Path(__file__).with_name("placement_probe.py")
TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
FOUR = "trainer.n_gpus_per_node=4"
CRITIC = "critic.n_gpus_per_node"
SPLIT = f"{FOUR} {TP}=1 trainer.layout=split trainer.rollout_gpus_per_node=2"


def devices(visible: str | None, *cases: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in ENV.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    number = 4 if visible is None else len(visible.split(","))
    ran = subprocess.run(
        [sys.executable, str(PROBE), str(number), *cases], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))  # Ray prints there too


def test_roles_of_a_rank_share_its_gpu_and_an_engine_has_as_many_as_ranks() -> None:
    shared, split, own, three = devices(
        None, f"{FOUR} {TP}=2", SPLIT, f"{FOUR} {TP}=2 {CRITIC}=2", f"{SPLIT} {CRITIC}=1"
    )
    assert shared["actor"] == shared["critic"] == ["0", "1", "2", "3"]
    assert shared["engines"] == ["0,1", "2,3"]
    assert split["engines"] == ["0", "1"] and split["actor"] == split["critic"] == ["2", "3"]
    assert split["table"].splitlines()[0] == "layout split: 2 training ranks and 2 engines of 1 GPU on 1 node"
    assert split["table"].splitlines()[2].split()[1:] == ["ranks", "0-1", "2,3", "engines", "0-1", "0,1"]
    assert (own["actor"], own["critic"], own["engines"]) == (["0", "1"], ["2", "3"], ["0,1"])
    assert (three["actor"], three["critic"], three["engines"]) == (["2"], ["3"], ["0", "1"])


@pytest.mark.parametrize("visible", ["5,7", pytest.param("GPU-a,GPU-b", marks=pytest.mark.slow)])
def test_only_the_gpus_that_the_user_made_visible_are_used(visible: str) -> None:
    (found,) = devices(visible, f"{TP}=1 trainer.n_gpus_per_node=2")
    assert found["actor"] == found["critic"] == found["engines"] == visible.split(",")
