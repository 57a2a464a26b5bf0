"""What a run does when it fails: it finishes what is being saved, and logs what happened and how to resume."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from verl.errors import Stalled, TrainingCollapsed, VerlError
from verl.process.interrupts import INTERRUPT_WAIT_S
from verl.process.stacks import collect_stacks
from verl.run import saved_state
from verl.run.checkpoints import Checkpoints
from verl.tracking.background_writer import BackgroundWriter

log = logging.getLogger(__name__)


@contextlib.contextmanager
def last_words(run_dir: Path, checkpoints: Checkpoints, writer: BackgroundWriter) -> Iterator[None]:
    """When the block fails or is interrupted: wait for state and files being written, and name the newest state.

    The wait is short after an interrupt (the entry point then names the state in its last line), and if a worker
    hangs, whose stacks are written first.
    """
    try:
        yield
    except TrainingCollapsed:
        _keep(checkpoints, writer, None)
        raise
    except KeyboardInterrupt:
        log.warning("interrupted: finishing what is being written, for at most %.0f s", INTERRUPT_WAIT_S)
        _keep(checkpoints, writer, INTERRUPT_WAIT_S)
        raise
    except Stalled:
        _write_stacks(run_dir)
        _keep(checkpoints, writer, INTERRUPT_WAIT_S)
        _log_newest_state(run_dir)
        raise
    except Exception:
        _keep(checkpoints, writer, None)
        _log_newest_state(run_dir)
        raise


def report_stall(run_dir: Path, seconds: float) -> None:
    """Report a driver that hangs, before it is ended."""
    log.error("the driver made no progress for %.0f s (trainer.step_timeout_s) and is stopped", seconds)
    _write_stacks(run_dir)
    _log_newest_state(run_dir)


def _keep(checkpoints: Checkpoints, writer: BackgroundWriter, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        checkpoints.settle(wait=True, timeout_s=timeout_s)
    except VerlError as error:
        log.warning("the latest checkpoint could not be saved: %s", error)
    try:
        writer.drain(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except Exception as error:  # whatever it is, the run ends with the error that it has
        log.warning("trajectories of the latest steps could not be saved: %s", error)


def _write_stacks(run_dir: Path) -> None:
    """Write the stacks of all processes on this node to `{run folder}/stacks`."""
    paths = collect_stacks(run_dir / "stacks")
    log.error("the stacks of all processes are in %s (%s)", run_dir / "stacks", ", ".join(path.name for path in paths))


def _log_newest_state(run_dir: Path) -> None:
    log.warning(saved_state.how_to_resume(run_dir))
