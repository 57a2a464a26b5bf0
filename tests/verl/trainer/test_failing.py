"""A run that fails or is interrupted keeps what it has handed to the background writer."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from verl.errors import StorageError, TrainingCollapsed
from verl.tracking.background_writer import BackgroundWriter
from verl.trainer import failing
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.failing import last_words


def no_state(run_dir: Path) -> Checkpoints:
    """Of a run that has saved nothing yet, whose roles nobody asks."""
    return Checkpoints(run_dir, cast(Any, None), None, with_anchor=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("of the run"), TrainingCollapsed("a"), KeyError()])
def test_files_that_were_handed_over_are_written_first(tmp_path: Path, error: BaseException) -> None:
    writer = BackgroundWriter()

    def slow() -> None:
        time.sleep(0.1)
        (tmp_path / "file").touch()

    with pytest.raises(type(error)) as caught, last_words(tmp_path, no_state(tmp_path), writer):
        writer.hand_over(slow)
        raise error
    assert caught.value is error
    assert (tmp_path / "file").exists()
    writer.close()


def test_an_error_of_the_writer_is_told_beside_that_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = BackgroundWriter()
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError), last_words(tmp_path, no_state(tmp_path), writer):
        writer.hand_over(lambda: int("no number"))
        raise KeyError
    assert any(
        "trajectories of the latest steps could not be saved: invalid literal" in line for line in caplog.messages
    )
    writer.close()


def test_an_interrupted_run_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failing, "INTERRUPT_WAIT_S", 0.3)
    writer, answers = BackgroundWriter(), threading.Event()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), last_words(tmp_path, no_state(tmp_path), writer):
        writer.hand_over(answers.wait)
        raise KeyboardInterrupt
    assert 0.3 <= time.monotonic() - start < 60
    assert any("could not be saved: 1 files were not written within" in line for line in caplog.messages)
    answers.set()
    writer.close()
