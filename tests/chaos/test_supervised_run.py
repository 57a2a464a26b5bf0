"""run_with_restart.sh around a real run whose driver is killed twice: in the end it is one that never was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from killed_runs import ROLLOUT, UPDATE, KilledRun, assert_same_runs, settings_of

STEPS = 4
COMMAND = "-m verl.trainer.main_ppo"  # of the driver, and among the arguments of the supervisor


@pytest.mark.slow
def test_two_kills_leave_no_trace(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> None:
    settings = settings_of(tinywiki, policy, tinywiki_url, STEPS)
    straight, killed = KilledRun(tmp_path / "straight", settings), KilledRun(tmp_path / "killed", settings)
    straight.finish()
    process = killed.start(supervised=True)
    try:
        for step, phase in ((1, UPDATE), (2, ROLLOUT)):
            killed.wait_until(phase, after_step=step)
            (driver,) = [child for child in process.processes(COMMAND) if child.pid != process.process.pid]
            driver.send_signal(signal.SIGKILL)
        assert process.end(900) == 0, process.said[-6000:]
    finally:
        process.kill()
    said = [line for line in process.said.splitlines() if line.startswith("run_with_restart: ")]
    assert len(said) == 2 and all("exit status 137; restart" in line for line in said), said
    assert_same_runs(straight, killed, STEPS)
