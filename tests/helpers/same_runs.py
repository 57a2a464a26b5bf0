"""What the folders of two runs have in common when the runs are the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from e2e_world import metrics_by_step
from safetensors.torch import load_file

from verl.tracking.trajectory_store import read_trajectories

OF_THE_MACHINE = ("time", "timing", "memory", "perf")  # beginnings of metrics of the clock and of what is used
OF_THE_LAYOUT = ("global_seqlen",)  # how the tokens of a step are spread over the ranks


def learned(folder: Path, besides: tuple[str, ...] = ()) -> dict[int, dict[str, float]]:
    """The metrics of each step, without those of the machine and those that begin with one of `besides`."""
    return {
        step: {name: row[name] for name in row if not name.startswith((*OF_THE_MACHINE, *besides))}
        for step, row in metrics_by_step(folder).items()
    }


def assert_same_weights(one: Path, other: Path, step: int, roles: set[str]) -> None:
    """Of all models that were saved after the step, which are those of `roles` or more, to the last bit."""
    models = sorted(one.glob(f"*/global_step_{step}/model.safetensors"))
    assert {path.parts[-3] for path in models} >= roles
    for path in models:
        weights, others = load_file(path), load_file(other / path.relative_to(one))
        assert weights.keys() == others.keys()
        assert all(weights[name].equal(others[name]) for name in weights), path


def assert_same_trajectories(one: Path, other: Path, steps: Iterable[int]) -> None:
    columns = ["ids", "loss_mask", "log_probs", "reward"]
    for step in steps:
        paths = [folder / "trajectories" / f"train_step_{step}.parquet" for folder in (one, other)]
        assert read_trajectories(paths[0], columns) == read_trajectories(paths[1], columns)
