"""Runs of main_ppo that can be killed in a phase, and what two runs have in common when they are the same.

What a worker is doing is read from its process title, which Ray sets to the method that is running.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from e2e_world import metrics_by_step
from safetensors.torch import load_file
from training_process import TrainingProcess

from verl.tracking.trajectory_store import read_trajectories

ROLLOUT, UPDATE = "ray::RolloutWorker.play", "ray::ActorWorker.update"


class KilledRun:
    """One run folder and its settings, started as often as it takes."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self.folder = folder
        own = (f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")
        self.arguments = ("-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", *settings, *own)

    def start(self, supervised: bool = False) -> TrainingProcess:
        log = self.folder.parent / f"{self.folder.name}.log"
        self.running = TrainingProcess(self.arguments, log, supervised)
        return self.running

    def finish(self) -> None:
        assert self.start().end(1200) == 0, self.running.said[-6000:]

    def wait_until(self, phase: str, after_step: int) -> None:
        """Until the state of `after_step` is there and some worker's title (or a file in state/) has `phase` in it."""
        self.running.wait_until(lambda: self.state(after_step).is_dir() and self._is_in(phase), timeout_s=900)

    def stop_in(self, phase: str, after_step: int) -> list[psutil.Process]:
        """As `wait_until`; the workers in `phase`, stopped there (SIGSTOP)."""
        while True:
            self.wait_until(phase, after_step)
            found = self.running.processes(phase)
            for process in found:
                process.suspend()
            if found and all(phase in " ".join(process.cmdline()) for process in found):
                return found
            for process in found:  # one was faster
                process.resume()

    def kill_driver(self) -> float:
        """SIGKILL; returns after how many seconds the last process of the run had ended."""
        killed_at = time.monotonic()
        self.running.process.send_signal(signal.SIGKILL)
        self.running.end(timeout_s=60, others_s=60)
        return time.monotonic() - killed_at

    def state(self, step: int) -> Path:
        return self.folder / "state" / f"global_step_{step}"

    def metrics(self) -> dict[int, dict[str, Any]]:
        """All but times, by step; the later line counts."""
        return {
            step: {name: row[name] for name in row if not name.startswith(("time", "timing", "memory", "perf"))}
            for step, row in metrics_by_step(self.folder).items()
        }

    def _is_in(self, phase: str) -> bool:
        if phase.startswith("."):
            return any(path.name.endswith(phase) for path in (self.folder / "state").iterdir())
        return bool(self.running.processes(phase))


def assert_same_runs(one: KilledRun, other: KilledRun, steps: int) -> None:
    """Metrics, trajectories, models, optimizers, anchors, counters and random states, to the last bit."""
    assert one.metrics() == other.metrics() and sorted(one.metrics()) == list(range(1, steps + 1))
    for step in range(1, steps + 1):
        paths = [run.folder / "trajectories" / f"train_step_{step}.parquet" for run in (one, other)]
        columns = ["ids", "loss_mask", "log_probs", "reward"]
        assert read_trajectories(paths[0], columns) == read_trajectories(paths[1], columns)
    models = sorted(one.folder.glob(f"*/global_step_{steps}/model.safetensors"))
    for path in models:
        tensors, others = load_file(path), load_file(other.folder / path.relative_to(one.folder))
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    states = [saved_tensors(run.state(steps)) for run in (one, other)]
    assert models and states[0] == states[1]
    progress = [json.loads((run.state(steps) / "trainer.json").read_text()) for run in (one, other)]
    assert progress[0] == progress[1]


def saved_tensors(state: Path) -> dict[str, bytes]:
    """What the distributed checkpoints have: weights, optimizers, anchor, counters, random states."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = {}
    for role in sorted(path for path in state.iterdir() if path.is_dir()):
        whole = state.parent.parent / f"{role.name}.pt"
        dcp_to_torch_save(role, whole)
        for name, tensor in torch.load(whole, weights_only=True).items():
            found[f"{role.name}/{name}"] = tensor.contiguous().numpy().tobytes()
        os.unlink(whole)
    for part in ("exp_avg_sq", "random.torch", "random.python", "counter.step"):
        assert any(part in name for name in found), part
    return found


def settings_of(tinywiki: Path, policy: Path, url: str, steps: int, workers: int = 1) -> tuple[str, ...]:
    """24 trajectories a step, two updates a step, a state after each step, a validation after every second."""
    return (
        *(f"data.train_files={tinywiki / 'train.parquet'}", f"data.val_files={tinywiki / 'validation.parquet'}"),
        *(f"actor_rollout_ref.model.path={policy}", f"retriever.url={url}", "data.val_data_num=8"),
        *("data.train_batch_size=6", "actor_rollout_ref.rollout.n_agent=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.entropy_coeff=0.01"),
        *(f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.test_freq=2", "trainer.logger=[]"),
        *("+trainer.val_before_train=false", f"trainer.n_gpus_per_node={workers}", "trainer.deterministic=true"),
    )
