"""How far the writing of a checkpoint is, by what is on the disk: the ranks that write it are other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from long_task import BYTES, Progress
from verl.startup import beside
from verl.trainer.saved_state import step_folders

LOOK_S = 0.5


@contextmanager
def saving(path: Path, expected: int | None = None) -> Iterator[None]:
    """Around what writes `path`, under its temporary name first.

    It is taken to become as large as the newest checkpoint beside it, or as `expected`; without either there is a rate
    and no time left.
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
    """Of its files, also of those that are about to get another name."""
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
