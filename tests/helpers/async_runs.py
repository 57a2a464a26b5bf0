"""Runs that sample ahead of training, and what they have stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.tracking.trajectory_store import read_trajectories

STEPS = 6
Command = Callable[..., tuple[str, ...]]
CORRECTED = (
    "actor_rollout_ref.actor.use_rollout_log_probs=false",
    "actor_rollout_ref.actor.rollout_correction.importance=token",
)
ONE_STEP_OFF = ("trainer.async_rollout=one_step_off", *CORRECTED)
BOUNDED = ("trainer.async_rollout=bounded", "trainer.max_staleness=2", *CORRECTED)
PLAIN = ("+trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.logger=[]", "data.val_data_num=4")


def stored(folder: Path, step: int, split: str = "train") -> list[dict[str, Any]]:
    return read_trajectories(folder / "trajectories" / f"{split}_step_{step}.parquet")


def prompts_of(folder: Path, steps: int = STEPS) -> list[list[str]]:
    """The questions of each step, once each."""
    return [list(dict.fromkeys(row["question"] for row in stored(folder, step))) for step in range(1, steps + 1)]


def assert_each_prompt_once(folder: Path) -> None:
    drawn = [question for questions in prompts_of(folder) for question in questions]
    assert len(drawn) == 6 * STEPS and len(set(drawn)) == len(drawn)


def versions_of(folder: Path, step: int, split: str = "train") -> set[int]:
    return {row["weight_version"] for row in stored(folder, step, split)}
