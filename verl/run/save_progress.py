"""Progress of writing a checkpoint, measured on disk, because the ranks that write it are other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from long_task import BYTES, Progress
from verl.process.startup import beside
from verl.run.saved_state import step_folders

LOOK_S = 0.5


@contextmanager
def saving(path: Path, expected: int | None = None) -> Iterator[None]:
    """Show progress while `path` is written, under its temporary name.

    Its final size is assumed to be that of the newest checkpoint beside it, or `expected`; without either, a rate is
    shown but no time left.
    """
    written = path.with_name(f".{path.name}.writing")
    earlier = [folder for folder in step_folders(path.parent) if folder != path]
    total = folder_bytes(earlier[-1]) if earlier else expected
    with (
        Progress(f"save {path.parent.name}/{path.name}", total, unit=BYTES) as progress,
        beside(partial(_look, written, progress)),
    ):
        yield


def folder_bytes(folder: Path) -> int:
    """Size of its files, also of those that are about to be renamed."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # it has another name by now
            continue
    return total


def _look(folder: Path, progress: Progress, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        found = folder_bytes(folder)
        if found > progress.done:
            progress.reach(found)
