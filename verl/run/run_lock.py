"""One run at a time in a folder: two would write the same steps."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from verl.errors import ConfigError
from verl.process.storage import writing

log = logging.getLogger(__name__)

LOCK = ".lock"
"""In the run folder: which process uses it. It stays when the run ends, but counts only while that process lives."""


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
