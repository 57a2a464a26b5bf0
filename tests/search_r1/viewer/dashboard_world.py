"""Runs with the metrics of many steps, logged through the tracker as training does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from viewer_world import CONFIG, Episodes, river_step, write_step

from verl.config.sections.trainer import CollapseGuardConfig
from verl.protocol import Trajectory
from verl.tracking.spans import Span, write_timeline
from verl.tracking.tracker import Tracker
from verl.trainer.collapse_guard import CollapseGuard
from verl.trainer.metrics.batch import step_metrics, validation_metrics
from verl.trainer.metrics.health import health_metrics
from verl.trainer.metrics.performance import retriever_metrics, throughput_metrics

STEP_S = {"gen": 2.0, "update_actor": 1.5, "weight_sync": 0.25, "step": 4.0, "testing": 0.5}


def settings(seed: int, **more: Any) -> dict[str, Any]:
    return CONFIG | {"trainer": {"seed": seed, "default_local_dir": f"runs/seed{seed}"}} | more


def score(step: int, seed: int) -> float:
    return round(0.2 + 0.6 * (1 - math.exp(-step / 8)) + 0.05 * math.sin(step + 2 * seed), 6)


def trained_run(
    folder: Path, episodes: Episodes, seed: int = 0, steps: int = 12, config: dict[str, Any] | None = None
) -> Path:
    """The reward is that of `score`; it falls below the guard's limit in the last three steps, so that it alarms."""
    guard = CollapseGuard(CollapseGuardConfig(action="warn", min_reward=0.3, patience=2))
    sampled = [river_step(episodes, is_later=step % 2 == 0) for step in range(2)]
    with Tracker([], "project", folder.name, folder, config or settings(seed)) as tracker:
        for step in range(1, steps + 1):
            tracker.log(step_numbers(sampled[step % 2], guard, step, seed, falls=step > steps - 3), step)
            write_timeline(folder, step, SPANS)
    write_step(folder, episodes, "train", 3, river_step(episodes))
    write_step(folder, episodes, "val", 4, river_step(episodes)[:1])
    return folder


def step_numbers(
    sampled: list[Trajectory], guard: CollapseGuard, step: int, seed: int, falls: bool = False
) -> dict[str, float]:
    """What the trajectories and the clock say, beside numbers for those that only a model gives."""
    metrics = step_metrics(sampled, None, seconds=STEP_S) | health_metrics(sampled, None)
    search_ms = [event["milliseconds"] for one in sampled for event in one.events if "milliseconds" in event]
    metrics |= throughput_metrics(10_000 + 100 * step, 4.0, 1) | retriever_metrics(search_ms, 4.0)
    metrics |= {"critic/score/mean": 0.05 if falls else score(step, seed)}
    metrics |= {"actor/kl_loss": 0.001 * step, "actor/entropy_loss": 1 / step, "actor/grad_norm": 0.5}
    if step % 4 == 0:
        metrics |= validation_metrics(sampled)
    guard.observe(metrics, step)
    return metrics | guard.metrics()


SPANS = {
    "driver": [Span("gen", 100.0, 102.0), Span("update_actor", 102.0, 103.5), Span("step", 100.0, 104.0)],
    "engine 0": [Span("rollouts", 100.5, 102.0), Span("generate", 100.5, 101.0), Span("generate", 101.25, 102.0)],
    "actor 0": [Span("update_and_score", 102.0, 103.5)],
}
