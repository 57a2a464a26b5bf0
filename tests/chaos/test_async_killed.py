"""A run that samples ahead of training is killed and interrupted: each prompt is trained once, no process is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from async_runs import BOUNDED, PLAIN, STEPS, Command, assert_each_prompt_once, prompts_of
from e2e_world import metrics_by_step, run
from killed_runs import EMA_PG, Runs
from phases import UPDATE, standing_still
from training_process import TrainingProcess

from verl.run import saved_state


@pytest.mark.slow
@pytest.mark.timeout(2400)  # five runs
def test_killed_interrupted_and_resumed_it_uses_each_prompt_once(
    async_command: Command, runs: Runs, tmp_path: Path
) -> None:
    """In an update, while two further steps are sampled or ready. An interrupted run ends at once, with the status of
    an interruption. The steps' prompts are those of a run that samples in turn, too.
    """
    folder = tmp_path / "run"
    command = async_command(folder, *BOUNDED, *PLAIN, "trainer.save_freq=1", "trainer.resume_mode=auto")
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)):
        process = TrainingProcess(command, tmp_path / f"log_{number}")
        process.wait_until(saved_state.state_path(folder, 2).is_dir)
        with standing_still(process.stop_in(UPDATE)):
            process.process.send_signal(number)
        assert process.end(timeout_s=90) == status, process.said[-4000:]
        assert "Traceback" not in process.said, process.said[-4000:]
    run(*command)
    assert prompts_of(folder) == prompts_of(runs.straight(EMA_PG).folder)
    assert_each_prompt_once(folder)
    metrics = metrics_by_step(folder)
    assert sorted(metrics) == list(range(1, STEPS + 1))
    assert max(metrics[step]["rollout/staleness/max"] for step in metrics) <= 2
