"""Which devices the roles of a run are given, by Ray itself on GPUs that it is told to have."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import placement_probe
import pytest
from e2e_world import ENV
from placement_probe import devices_of_roles

TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"
TWO, THREE, FOUR = (f"trainer.n_gpus_per_node={number}" for number in (2, 3, 4))
CRITIC = "critic.n_gpus_per_node"
SPLIT = f"{TP}=1 trainer.layout=split trainer.rollout_gpus_per_node"


def devices_where(visible: str, *cases: str) -> list[dict[str, Any]]:
    """In a Ray that a user starts who made these GPUs visible."""
    number = len(visible.split(","))
    ran = subprocess.run(
        [sys.executable, placement_probe.__file__, str(number), *cases],
        env=ENV | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))  # Ray prints there too


def test_roles_of_a_rank_share_its_gpu_and_an_engine_has_as_many_as_ranks() -> None:
    """Of the GPUs that the user made visible."""
    shared, own = devices_where("2,4,5,7", f"{FOUR} {TP}=2", f"{FOUR} {TP}=2 {CRITIC}=2")
    assert shared["actor"] == shared["critic"] == ["2", "4", "5", "7"]
    assert shared["engines"] == ["2,4", "5,7"]
    assert (own["actor"], own["critic"], own["engines"]) == (["2", "4"], ["5", "7"], ["2,4"])


def test_where_the_user_made_no_choice_the_gpus_have_numbers(ray_session: Any) -> None:
    found = devices_of_roles(*f"{TWO} {SPLIT}=1".split())
    [actor], [critic], [engine] = found["actor"], found["critic"], found["engines"]
    assert actor == critic and 0 <= int(engine) < int(actor) < 8
    title, _, row = found["table"].splitlines()
    assert title == "layout split: 1 training rank and 1 engine of 1 GPU on 1 node"
    assert row.split()[1:] == ["rank", "0", actor, "engine", "0", engine]


@pytest.mark.slow
def test_gpus_that_the_user_calls_by_their_ids() -> None:
    shared, apart = devices_where("GPU-a,GPU-b,GPU-c", f"{TP}=1 {TWO}", f"{THREE} {SPLIT}=1 {CRITIC}=1")
    assert shared["actor"] == shared["critic"] == shared["engines"] == ["GPU-a", "GPU-b"]
    assert (apart["engines"], apart["actor"], apart["critic"]) == (["GPU-a"], ["GPU-b"], ["GPU-c"])
