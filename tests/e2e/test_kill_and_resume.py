"""A run that is killed by SIGKILL again and again, each time in another phase, ends as one that never was.

What a worker is doing is read from its process title, which Ray sets to the method that is running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from e2e_world import ENV, ROOT
from safetensors.torch import load_file

from verl.tracking.trajectory_store import read_trajectories

STEPS = 6
PHASES = {
    "rollout": "ray::RolloutWorker.run",
    "update": "ray::ActorWorker.update",
    "weight sync": "ray::RolloutWorker.load_weights",
    "checkpoint write": ".writing",  # the temporary folder of a state
}
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


class Trainer:
    """The same run, started as often as it takes."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self.folder = folder
        command = (sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "tinywiki", *settings)
        self.command = (*command, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto")

    def start(self) -> subprocess.Popen[bytes]:
        self.log = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        return subprocess.Popen(self.command, cwd=ROOT, env=ENV, stdout=self.log, stderr=subprocess.STDOUT)

    def finish(self) -> None:
        assert self.start().wait(timeout=900) == 0, Path(self.log.name).read_text()[-6000:]

    def kill_in(self, phase: str, after_step: int) -> None:
        """Kill the driver without warning once the state of `after_step` is there and `phase` goes on."""
        driver = self.start()
        deadline = time.monotonic() + 600
        while not (self.state(after_step).is_dir() and self.is_in(phase, driver.pid)):
            assert driver.poll() is None, Path(self.log.name).read_text()[-6000:]
            assert time.monotonic() < deadline, f"never saw {phase}"
            time.sleep(0.002)
        children = [child for child in psutil.Process(driver.pid).children(recursive=True) if not _is_agent(child)]
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left, f"killed in {phase}: {[process.cmdline() for process in left]} live on"

    def is_in(self, phase: str, pid: int) -> bool:
        sign = PHASES[phase]
        if sign == ".writing":
            return any(path.name.endswith(sign) for path in (self.folder / "state").iterdir())
        return any(sign in _title(process) for process in psutil.Process(pid).children(recursive=True))

    def state(self, step: int) -> Path:
        return self.folder / "state" / f"global_step_{step}"

    def metrics(self) -> dict[int, dict[str, Any]]:
        steps: dict[int, dict[str, Any]] = {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            steps[row["step"]] = {name: row[name] for name in row if name != "time" and not name.startswith("timing")}
        return steps


def _is_agent(process: psutil.Process) -> bool:
    """Two agents of Ray's own hold nothing of the run, and notice only after a minute or more that it is gone."""
    return _title(process).strip() in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "workers"), [((), 1), (PPO, 1), ((), 2)], ids=["ema_pg", "ppo", "ema_pg_two_workers"]
)
def test_four_kills_leave_no_trace(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path, overrides: tuple[str, ...], workers: int
) -> None:
    settings = (
        *(f"data.train_files={tinywiki / 'train.parquet'}", f"data.val_files={tinywiki / 'validation.parquet'}"),
        *(f"actor_rollout_ref.model.path={policy}", f"retriever.url={tinywiki_url}", "data.val_data_num=8"),
        *("data.train_batch_size=6", "actor_rollout_ref.rollout.n_agent=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.entropy_coeff=0.01"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=2", "trainer.logger=[]"),
        *("+trainer.val_before_train=false", f"trainer.n_gpus_per_node={workers}", *overrides),
    )
    straight, killed = Trainer(tmp_path / "straight", settings), Trainer(tmp_path / "killed", settings)
    straight.finish()
    for step, phase in enumerate(PHASES, start=1):
        killed.kill_in(phase, after_step=step)
    killed.finish()
    assert killed.metrics() == straight.metrics() and sorted(killed.metrics()) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        paths = [run.folder / "trajectories" / f"train_step_{step}.parquet" for run in (killed, straight)]
        columns = ["ids", "loss_mask", "log_probs", "reward"]
        assert read_trajectories(paths[0], columns) == read_trajectories(paths[1], columns)
    for one in sorted(straight.folder.glob(f"*/global_step_{STEPS}/model.safetensors")):
        tensors, others = load_file(one), load_file(killed.folder / one.relative_to(straight.folder))
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert saved_tensors(straight.state(STEPS)) == saved_tensors(killed.state(STEPS))


def saved_tensors(state: Path) -> dict[str, bytes]:
    """What the distributed checkpoints have: weights, optimizers, anchor, counters.

    Random states are left out: two runs begin with different ones, and nothing in these runs draws from them.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found = {}
    for role in sorted(path for path in state.iterdir() if path.is_dir()):
        whole = state.parent.parent / f"{role.name}.pt"
        dcp_to_torch_save(role, whole)
        for name, tensor in torch.load(whole, weights_only=True).items():
            if not name.startswith("random."):
                found[f"{role.name}/{name}"] = tensor.contiguous().numpy().tobytes()
        os.unlink(whole)
    assert any("exp_avg_sq" in name for name in found)
    return found
