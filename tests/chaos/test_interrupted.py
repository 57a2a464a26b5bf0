"""Ctrl-C and SIGTERM while a state is being written: it is finished first, but nobody has to wait for long.

The writing is held up by stopping the worker that writes (SIGSTOP) until the test lets it go on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e_world import small_run
from phases import TRAINER
from training_process import TrainingProcess

from verl.run import saved_state
from verl.trainer.ending import INTERRUPT_WAIT_S

SETTINGS = (
    *("trainer.save_freq=1", "trainer.test_freq=-1", "+trainer.val_before_train=false", "data.val_data_num=4"),
    *("trainer.logger=[]", "trainer.resume_mode=auto"),
)
LOST = "the latest checkpoint could not be saved"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Interrupted:
    """A run that is writing a state and cannot get on with it."""

    def __init__(self, command: tuple[str, ...], folder: Path, log: Path) -> None:
        self.states = folder / "state"
        self.process = TrainingProcess(command, log)
        while True:
            self.process.wait_until(lambda: any(self.states.glob(".*.writing/actor/__0_0.distcp")))
            (self.worker,) = self.process.processes(TRAINER)
            self.worker.suspend()
            time.sleep(2)  # for the driver to go on
            if written := [path.name for path in self.states.glob(".*.writing")]:
                break
            self.worker.resume()  # it was faster
        self.step = int(written[0].removeprefix(".global_step_").removesuffix(".writing"))

    def interrupt(self, number: signal.Signals) -> None:
        """Ctrl-C goes to the whole group, as a terminal does it; SIGTERM to the driver alone, as `kill` does it."""
        if number == signal.SIGINT:
            os.killpg(self.process.process.pid, number)
        else:
            self.process.process.send_signal(number)

    def wait_for_the_answer(self) -> None:
        self.process.wait_until(lambda: "finishing what is being written" in self.process.said)

    def newest(self) -> int:
        path, skipped = saved_state.newest(self.states.parent)
        assert path is not None and skipped == []
        return saved_state.step_of(path)


@pytest.fixture
def interrupted(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> Interrupted:
    command = small_run(tinywiki, policy, tinywiki_url, tmp_path / "run", *SETTINGS, "trainer.total_training_steps=50")
    return Interrupted(command, tmp_path / "run", tmp_path / "log")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl_c", "sigterm"])
def test_the_state_that_is_being_written_is_finished(interrupted: Interrupted, number: signal.Signals) -> None:
    interrupted.interrupt(number)
    interrupted.wait_for_the_answer()
    time.sleep(1)
    assert interrupted.process.process.poll() is None
    interrupted.worker.resume()
    assert_ended(interrupted, saved=True)


def test_a_second_signal_ends_at_once(interrupted: Interrupted) -> None:
    interrupted.interrupt(signal.SIGTERM)
    interrupted.wait_for_the_answer()
    interrupted.interrupt(signal.SIGTERM)
    began = time.monotonic()
    assert_ended(interrupted, saved=False)
    assert LOST not in interrupted.process.said  # the wait was broken off, and did not come to its end
    print(f"ended {time.monotonic() - began:.1f} s after the second signal")


def test_a_state_that_does_not_get_finished(interrupted: Interrupted) -> None:
    interrupted.interrupt(signal.SIGTERM)
    began = time.monotonic()
    assert_ended(interrupted, saved=False)
    assert LOST in interrupted.process.said
    assert INTERRUPT_WAIT_S - 1 < time.monotonic() - began < INTERRUPT_WAIT_S + 60
    print(f"ended {time.monotonic() - began:.1f} s after the signal")


def assert_ended(interrupted: Interrupted, saved: bool) -> None:
    assert interrupted.process.end(120) == 130, interrupted.process.said[-6000:]
    said = interrupted.process.said
    assert said.splitlines()[-1] == f"interrupted: {saved_state.how_to_resume(interrupted.states.parent)}"
    assert "Traceback" not in said
    newest = interrupted.step if saved else interrupted.step - 1
    names = [path.name for path in interrupted.states.iterdir() if not path.name.startswith(".")]
    assert sorted(names) == sorted(f"global_step_{step}" for step in range(1, newest + 1))
    if newest:
        assert interrupted.newest() == newest
    if saved:
        assert f"the run resumes from {interrupted.states / f'global_step_{newest}'}" in said
