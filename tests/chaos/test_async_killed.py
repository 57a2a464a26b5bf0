"""A run that samples ahead of training is killed or interrupted: each prompt is trained once, no process is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from async_runs import BOUNDED, PLAIN, STEPS, Command, assert_each_prompt_once, prompts_of
from e2e_world import metrics_by_step, run
from training_process import TrainingProcess

pytestmark = pytest.mark.slow  # six runs of a few steps


def test_killed_and_resumed_it_uses_each_prompt_once(async_command: Command, tmp_path: Path) -> None:
    """Killed in an update, while two further steps are sampled or ready. The steps' prompts are those of a run that
    samples in turn, too.
    """
    saved = (*PLAIN, "trainer.save_freq=1", "trainer.resume_mode=auto")
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run(*async_command(straight, *PLAIN))
    for after in (2, 4):
        kill_in_an_update(
            TrainingProcess(async_command(killed, *BOUNDED, *saved), tmp_path / f"log_{after}"), killed, after
        )
    run(*async_command(killed, *BOUNDED, *saved))
    assert prompts_of(killed) == prompts_of(straight)
    assert_each_prompt_once(killed)
    metrics = metrics_by_step(killed)
    assert sorted(metrics) == list(range(1, STEPS + 1))
    assert max(metrics[step]["rollout/staleness/max"] for step in metrics) <= 2


def kill_in_an_update(process: TrainingProcess, folder: Path, after_step: int) -> None:
    state = folder / "state" / f"global_step_{after_step}"
    process.wait_until(lambda: state.is_dir() and process.processes("ActorWorker.update"))
    process.process.send_signal(signal.SIGKILL)
    assert process.end(timeout_s=60) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_an_interrupted_run_ends_though_it_samples(
    async_command: Command, tmp_path: Path, number: signal.Signals
) -> None:
    """At once, with the status of an interruption, and no process left (`end` looks for them)."""
    process = TrainingProcess(async_command(tmp_path / "run", *BOUNDED, *PLAIN), tmp_path / "log")
    process.wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").is_file())
    process.wait_until(lambda: process.processes("ActorWorker.update"))
    process.process.send_signal(number)
    assert process.end(timeout_s=90) == 130, process.said[-4000:]
    assert "Traceback" not in process.said, process.said[-4000:]
