"""Runs of main_ppo that can be killed in a phase, and what two runs have in common when they are the same."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from phases import TRAINER, Phase, kill, resume, standing_still, title_of
from same_runs import assert_same_trajectories, assert_same_weights, learned
from training_process import TrainingProcess

from verl.run import saved_state

STEPS = 6
COMMAND = "-m verl.trainer.main_ppo"
WRITING: Phase = ()  # a state, which is no method: ranks do it in the background
ONE_OF_THEM = ""


class KilledRun:
    """One run folder and its settings, started as often as it takes."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self.folder = folder
        own = (f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")
        self.arguments = (*COMMAND.split(), "--config-name", "tinywiki", *settings, *own)

    def start(self, *overrides: str, supervised: bool = False) -> TrainingProcess:
        log = self.folder.parent / f"{self.folder.name}.log"
        self.running = TrainingProcess((*self.arguments, *overrides), log, supervised)
        return self.running

    def finish(self) -> None:
        assert self.start().end(1200) == 0, self.running.said[-6000:]

    def stop_in(self, phase: Phase, after_step: int, number: int = 1) -> list[psutil.Process]:
        """Wait for the state of `after_step`, and then for that many workers in the phase at once, or more; those,
        stopped there (SIGSTOP).
        """
        self.running.wait_until(self.state(after_step).is_dir)
        return self.running.stop_in(phase, number) if phase else self._stop_writing()

    def kill_in(self, phase: Phase, after_step: int, victim: str = ONE_OF_THEM) -> str:
        """Kill a process while all workers that are in the phase stand still: one of them, or the one with `victim` in
        its command line. Returns its title.
        """
        with standing_still(self.stop_in(phase, after_step)) as workers:
            process = workers[-1] if victim == ONE_OF_THEM else self.running.processes(victim)[0]
            name = title_of(process)
            kill(process)
        return name

    def kill_driver_in(self, phase: Phase, after_step: int) -> None:
        """It may have a supervisor."""
        with standing_still(self.stop_in(phase, after_step)):
            [driver] = [process for process in self.running.processes(COMMAND) if process.name() != "bash"]
            kill(driver)
            assert phase or self._writing(), "it was killed before the state got its name"

    def state(self, step: int) -> Path:
        return saved_state.state_path(self.folder, step)

    def newest_state(self) -> Path:
        """It is intact, and the run has said that it resumes from it."""
        state = list(saved_state.saved(self.folder))[-1]
        saved_state.verify(state)
        assert f"the run resumes from {state}" in self.running.said
        return state

    def _writing(self) -> list[Path]:
        return list((self.folder / "state").glob(".*.writing"))

    def _stop_writing(self) -> list[psutil.Process]:
        while True:
            self.running.wait_until(self._writing)
            workers = self.running.processes(TRAINER)
            for worker in workers:
                worker.suspend()
            time.sleep(0.5)  # for what the driver may already know
            if self._writing():
                return workers
            resume(workers)  # they were faster


def assert_same_runs(one: KilledRun, other: KilledRun) -> None:
    """Metrics, trajectories, models, optimizers, anchors, counters and random states, to the last bit."""
    assert learned(one.folder) == learned(other.folder) and sorted(learned(one.folder)) == list(range(1, STEPS + 1))
    assert_same_trajectories(one.folder, other.folder, range(1, STEPS + 1))
    assert_same_weights(one.folder, other.folder, STEPS, {"actor"})
    states = [saved_tensors(run.state(STEPS)) for run in (one, other)]
    assert states[0] == states[1]
    progress = [json.loads((run.state(STEPS) / "trainer.json").read_text()) for run in (one, other)]
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


PPO = (
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=24",
    "actor_rollout_ref.rollout.n_agent=1",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "algorithm.ref_policy_ema_tau=1.0",
    "critic.model.path=${actor_rollout_ref.model.path}",
    "critic.optim.lr=1.0e-3",
    "critic.ppo_max_token_len_per_gpu=4096",
)
EMA_PG, PPO_TWO_WORKERS, CURRICULUM = "ema_pg", "ppo_two_workers", "curriculum"
THREE_EPOCHS = ("data.train_data_num=12", "data.curriculum.enable=true")
KINDS = {EMA_PG: (), PPO_TWO_WORKERS: (*PPO, "trainer.n_gpus_per_node=2"), CURRICULUM: THREE_EPOCHS}


@dataclass(frozen=True)
class Runs:
    """Of `STEPS` steps with 24 trajectories, two updates a step, a state after each step, a validation after every
    second.
    """

    tinywiki: Path
    policy: Path
    url: str
    built_once: Callable[[str, Callable[[Path], None]], Path]

    def make(self, folder: Path, kind: str, *overrides: str) -> KilledRun:
        files = (
            f"data.train_files={self.tinywiki / 'train.parquet'}",
            f"data.val_files={self.tinywiki / 'validation.parquet'}",
        )
        sizes = ("data.val_data_num=8", "data.train_batch_size=6", "actor_rollout_ref.rollout.n_agent=4")
        updates = ("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.entropy_coeff=0.01")
        times = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2")
        others = ("+trainer.val_before_train=false", "trainer.logger=[]", "trainer.deterministic=true")
        given = (f"actor_rollout_ref.model.path={self.policy}", f"retriever.url={self.url}")
        return KilledRun(folder, (*files, *sizes, *updates, *times, *others, *given, *KINDS[kind], *overrides))

    def straight(self, kind: str) -> KilledRun:
        """One that nothing has disturbed, the same for all tests."""
        folder = self.built_once(f"straight_{kind}", lambda folder: self.make(folder / "run", kind).finish())
        return self.make(folder / "run", kind)
