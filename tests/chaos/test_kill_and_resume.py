"""A run that is killed by SIGKILL again and again, in each phase and at random moments, ends as one that never was."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from killed_runs import ROLLOUT, UPDATE, KilledRun, assert_same_runs, settings_of

STEPS = 6
PHASES = {
    "rollout": ROLLOUT,
    "update": UPDATE,
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "workers"),
    [((), 1), (PPO, 1), ((), 2), (PPO, 2)],
    ids=["ema_pg", "ppo", "ema_pg_two_workers", "ppo_two_workers"],
)
def test_four_kills_leave_no_trace(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path, overrides: tuple[str, ...], workers: int
) -> None:
    settings = settings_of(tinywiki, policy, tinywiki_url, STEPS, workers) + overrides
    straight, killed = KilledRun(tmp_path / "straight", settings), KilledRun(tmp_path / "killed", settings)
    straight.finish()
    for step, (name, phase) in enumerate(PHASES.items(), start=1):
        killed.start()
        killed.wait_until(phase, after_step=step)
        print(f"killed in {name}: the last process ended after {killed.kill_driver():.1f} s")
    killed.finish()
    assert_same_runs(straight, killed, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "workers"), [((), 1), (PPO, 2)], ids=["ema_pg", "ppo_two_workers"])
def test_random_processes_killed_at_random_moments_leave_no_trace(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path, overrides: tuple[str, ...], workers: int
) -> None:
    """Any process of the run, Ray's own too, until eight kills are done or the run has ended in spite of them."""
    settings = settings_of(tinywiki, policy, tinywiki_url, STEPS, workers) + overrides + ("trainer.step_timeout_s=120",)
    straight, killed = KilledRun(tmp_path / "straight", settings), KilledRun(tmp_path / "killed", settings)
    straight.finish()
    kills, status = 0, 1
    while kills < 8 and status != 0:
        running, start = killed.start(), time.monotonic()
        while kills < 8 and not has_ended(running.process, within_s=random.uniform(0, 45)):
            by_title = {" ".join(process.cmdline()): process for process in running.processes()}  # idle ones count once
            title, victim = random.choice(list(by_title.items()))
            states = sorted(path.name for path in (killed.folder / "state").glob("*"))
            print(f"kill {kills + 1}: {time.monotonic() - start:.1f} s after the start, states {states}: {title[:120]}")
            victim.kill()
            kills += 1
        status = running.end(600, others_s=60)
        print(f"ended with {status} after {time.monotonic() - start:.1f} s")
        assert status in (0, 1, -signal.SIGKILL), running.said[-6000:]  # 2 is not restarted
    killed.finish()
    assert_same_runs(straight, killed, STEPS)


def has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
