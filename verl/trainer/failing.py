"""What a run does when it fails: it keeps what is being saved, and says what happened and where it can go on from."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from verl.errors import Stalled, TrainingCollapsed, VerlError
from verl.stacks import collect_stacks
from verl.trainer import saved_state
from verl.trainer.checkpoints import Checkpoints

INTERRUPT_WAIT_S = 20.0  # schedulers kill what has not ended 30 s after their SIGTERM

log = logging.getLogger(__name__)


@contextlib.contextmanager
def last_words(run_dir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """When the block fails or is interrupted: wait for the state that is being written, and name the newest one.

    The wait is short where somebody interrupted (the entry point then names the state as its last line), and where a
    worker hangs, whose stacks are written first.
    """
    try:
        yield
    except TrainingCollapsed:
        _keep_state(checkpoints, None)
        raise
    except KeyboardInterrupt:
        log.warning("interrupted: a state that is being written is finished, for at most %.0f s", INTERRUPT_WAIT_S)
        _keep_state(checkpoints, INTERRUPT_WAIT_S)
        raise
    except Stalled:
        _tell_stacks(run_dir)
        _keep_state(checkpoints, INTERRUPT_WAIT_S)
        _tell_state(run_dir)
        raise
    except Exception:
        _keep_state(checkpoints, None)
        _tell_state(run_dir)
        raise


def tell_stall(run_dir: Path, seconds: float) -> None:
    """For a driver that hangs itself, and is ended next."""
    log.error("the driver got nothing done for %.0f s (trainer.step_timeout_s) and is ended", seconds)
    _tell_stacks(run_dir)
    _tell_state(run_dir)


def _keep_state(checkpoints: Checkpoints, timeout_s: float | None) -> None:
    try:
        checkpoints.settle(wait=True, timeout_s=timeout_s)
    except VerlError as error:
        log.warning("the state of the latest save is lost: %s", error)


def _tell_stacks(run_dir: Path) -> None:
    """Write the stacks of all processes on this node to `{run folder}/stacks`."""
    paths = collect_stacks(run_dir / "stacks")
    log.error("what each process was doing is in %s (%s)", run_dir / "stacks", ", ".join(path.name for path in paths))


def _tell_state(run_dir: Path) -> None:
    log.warning(saved_state.where_to_go_on(run_dir))
