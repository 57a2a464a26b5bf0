"""The folder of a run: whether it holds one already, and moving that one out of the way.

What belongs to a run is what runs write (`RESULTS`, `BESIDES`); any other file in the folder is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from verl.config.sections.trainer import Overwrite
from verl.errors import ConfigError, DataError
from verl.process.storage import whole_file, whole_lines, writing
from verl.run.last_checkpoint import last_checkpoint
from verl.tracking.backend import FILE_NAME as TRACKERS
from verl.tracking.jsonl_backend import FILE_NAME as METRICS

ARCHIVE = "archive"
_FOLDERS = (
    *("", "actor", "critic", "ref", "state", "trajectories"),
    *("timeline", "tensorboard", "wandb", "failures", "failures/critic", "stacks"),
)
RESULTS = re.compile(
    r"metrics\.jsonl|((actor|critic|ref|state)/)?global_step_(?P<step>\d+)"
    r"|(trajectories/\w+_step_(?P<stored>\d+)\.parquet)|(timeline/step_(?P<timed>\d+)\.json)"
)
"""Paths in the folder that only a run with results writes; a warm start has `global_step_N` at the top."""
BESIDES = re.compile(
    r"config\.yaml|template\.txt|retriever\.json|trackers\.json|mlruns|report\.(md|png)|((actor|critic|ref|state)/)?\.global_step_\d+\.writing"
    r"|tensorboard/events\.out\.tfevents\..+|wandb/((offline-)?run-.+|latest-run|debug.*\.log)"
    r"|failures/(critic/)?not_finite_step_\d+\.pt|stacks/.+-\d+\.txt"
)
RETRIEVER_FILE = "retriever.json"
"""In the run folder: how the retriever was started, for commands that ask the run's model when it has ended."""
LOCK = ".lock"
"""In the run folder: which process uses it. It stays when the run ends, but counts only while that process lives."""
log = logging.getLogger(__name__)


def holds_run(run_dir: Path) -> bool:
    """Whether a run wrote metrics, trajectories or a checkpoint there. One that failed before does not count."""
    return any(path.is_dir() or path.stat().st_size for path in _matching(run_dir, RESULTS))


def check_new_run(run_dir: Path, overwrite: Overwrite, resumable: bool = False) -> None:
    """Raise ConfigError, which says what to do, if the folder holds a run that must be kept."""
    if overwrite == "archive" or not holds_run(run_dir):
        return
    resume = "To resume it: trainer.resume_mode=auto. " if resumable else "It saved no checkpoint to resume from. "
    raise ConfigError(
        f"{run_dir} holds a run already ({_what_it_has(run_dir)}). {resume}To start another beside it: "
        f"trainer.default_local_dir=ANOTHER_FOLDER. To start another here, and move everything of the earlier one to "
        f"{run_dir / ARCHIVE}/DATE first: trainer.overwrite=archive"
    )


def archive(run_dir: Path) -> Path | None:
    """Move everything of a run to `archive/DATE` in its folder, which is then a run folder. None if there was no run.

    Raises StorageError.
    """
    if not holds_run(run_dir):
        return None
    target = _new_archive(run_dir)
    _move([*_matching(run_dir, RESULTS), *_matching(run_dir, BESIDES)], run_dir, target)
    return target


def archive_after(run_dir: Path, step: int) -> Path | None:
    """Move what was saved after `step` to `archive/DATE`, with a copy of the metrics; None if there was nothing.

    For a run that resumes from an earlier state of its own; W&B and MLflow get new runs, since the old ones have the
    later steps. Raises StorageError.
    """
    later = [path for path in _matching(run_dir, RESULTS) if _step_of(path, run_dir) > step]
    if not later and all(int(json.loads(line)["step"]) <= step for line in whole_lines(run_dir / METRICS)):
        return None
    target = _new_archive(run_dir)
    _move([*later, *run_dir.glob(TRACKERS)], run_dir, target)
    _cut_metrics(run_dir / METRICS, target / METRICS, step)
    return target


def archive_checkpoints_after(run_dir: Path, step: int) -> Path | None:
    """Move models and states that were saved after `step` to `archive/DATE`; None if there were none.

    For a run that resumes from there because its later states are damaged or unfinished: what is left of them would
    count as its last. Raises StorageError.
    """
    later = [path for path in _matching(run_dir, RESULTS) if path.is_dir() and _step_of(path, run_dir) > step]
    if not later:
        return None
    target = _new_archive(run_dir)
    _move(later, run_dir, target)
    return target


def _matching(run_dir: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    for folder in _FOLDERS:
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted((run_dir / folder).iterdir()):
                if pattern.fullmatch(path.relative_to(run_dir).as_posix()):
                    yield path


def _step_of(path: Path, run_dir: Path) -> int:
    found = RESULTS.fullmatch(path.relative_to(run_dir).as_posix())
    return int((found and (found["step"] or found["stored"] or found["timed"])) or -1)


def _what_it_has(run_dir: Path) -> str:
    try:
        return f"its last checkpoint is {last_checkpoint(run_dir).relative_to(run_dir)}"
    except DataError:
        return "without a checkpoint"


def _new_archive(run_dir: Path) -> Path:
    name = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(1, 1000):
        target = run_dir / ARCHIVE / (name if number == 1 else f"{name}_{number}")
        with writing(target), suppress(FileExistsError):
            target.mkdir(parents=True)
            return target
    raise AssertionError("a thousand archives in a second")


def _move(paths: Sequence[Path], run_dir: Path, target: Path) -> None:
    for path in paths:
        moved = target / path.relative_to(run_dir)
        with writing(moved):
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.rename(moved)
    for folder in reversed(_FOLDERS[1:]):
        with suppress(OSError):  # not there, or not empty
            (run_dir / folder).rmdir()


def _cut_metrics(path: Path, copy: Path, step: int) -> None:
    if not path.exists():
        return
    with whole_file(copy) as temporary:
        temporary.write_bytes(path.read_bytes())
    kept = [line for line in whole_lines(path) if int(json.loads(line)["step"]) <= step]
    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(kept))


# One run at a time in a folder: two would write the same steps.


def check_not_in_use(run_dir: Path) -> None:
    """Raise ConfigError, which names the process, while a run holds the folder. Writes nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError), (run_dir / LOCK).open() as file:
        _take(file, run_dir)


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Make the folder and lock it against other runs; the operating system releases the lock however this run ends.

    Raises ConfigError as `check_not_in_use` does, and StorageError.
    """
    with contextlib.ExitStack() as held:
        with writing(run_dir / LOCK):
            run_dir.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((run_dir / LOCK).open("a+"))
            _take(file, run_dir)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def _take(file: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"{run_dir} is in use by another run ({file.read().strip() or 'it has just started'}): wait for its "
            "end, or start this run elsewhere with trainer.default_local_dir=ANOTHER_FOLDER"
        ) from None
    except OSError as error:
        log.warning("%s: its file system has no locks (%s), so nothing prevents a second run in it", run_dir, error)
