"""A run that is killed by SIGKILL again and again, in each phase and at random moments, ends as one that never was."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from e2e_world import metrics_by_step
from killed_runs import CURRICULUM, PPO_TWO_WORKERS, WRITING, Runs, assert_same_runs
from phases import LOAD_WEIGHTS, ROLLOUT, UPDATE

PHASES = (LOAD_WEIGHTS, ROLLOUT, UPDATE, WRITING)  # the shortest first, while most steps are left
pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
def test_a_supervisor_goes_on_after_four_kills_which_leave_no_trace(runs: Runs, tmp_path: Path) -> None:
    """An actor and a critic of two ranks each, and an anchor that does not move."""
    straight, killed = runs.straight(PPO_TWO_WORKERS), runs.make(tmp_path / "killed", PPO_TWO_WORKERS)
    process = killed.start(supervised=True)
    for step, phase in enumerate(PHASES, start=1):
        killed.kill_driver_in(phase, after_step=step)
    assert process.end(900) == 0, process.said[-6000:]
    said = [line for line in process.said.splitlines() if line.startswith("run_with_restart: ")]
    assert len(said) == len(PHASES) and all("exit status 137; restart" in line for line in said), said
    assert_same_runs(straight, killed)


@pytest.mark.timeout(1800)
def test_random_processes_killed_at_random_moments_leave_no_trace(runs: Runs, tmp_path: Path) -> None:
    """Any process of the run, Ray's own too, until five kills are done or the run has ended in spite of them. It is
    started by hand, and has an anchor that moves and a curriculum, which skips prompts from the second epoch on.
    """
    straight = runs.straight(CURRICULUM)
    assert any(row.get("curriculum/skipped") for row in metrics_by_step(straight.folder).values())
    killed = runs.make(tmp_path / "killed", CURRICULUM, "trainer.step_timeout_s=120")
    kills, status = 0, 1
    while kills < 5 and status != 0:
        running, start = killed.start(), time.monotonic()
        while kills < 5 and not has_ended(running.process, within_s=random.uniform(0, 45)):
            by_title = {" ".join(process.cmdline()): process for process in running.processes()}  # idle ones count once
            title, victim = random.choice(list(by_title.items()))
            states = sorted(path.name for path in (killed.folder / "state").glob("*"))
            print(f"kill {kills + 1}: {time.monotonic() - start:.1f} s after the start, states {states}: {title[:120]}")
            victim.kill()
            kills += 1
        # An agent of Ray that finds raylet and GCS dead, as after a kill while Ray starts, ends itself only 60 s later.
        status = running.end(600, others_s=90)
        print(f"ended with {status} after {time.monotonic() - start:.1f} s")
        assert status in (0, 1, -signal.SIGKILL), running.said[-6000:]  # 2 is not restarted
    if status != 0:
        killed.finish()
    assert_same_runs(straight, killed)


def has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
