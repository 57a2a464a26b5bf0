"""Folders of weights in shared memory: one per owner, and none outlives its owner for long."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from forked import forked

from verl.weight_sync.memory import weight_folder


def own(parent: Path, driver: Connection) -> None:
    """As a process that is killed, or ends, when it is told to."""
    folder = weight_folder(parent)
    (folder.path / "buckets-1").write_bytes(b"1")
    driver.send(folder.path)
    if driver.recv() == "die":
        os.kill(os.getpid(), signal.SIGKILL)


class Owner:
    def __init__(self, parent: Path) -> None:
        context = forked()
        self._end, theirs = context.Pipe()
        self._process = context.Process(target=own, args=(parent, theirs), daemon=True)
        self._process.start()
        self.folder: Path = self._end.recv()

    def tell(self, order: str) -> None:
        self._end.send(order)
        self._process.join(60)


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """In a folder of its own: any other owner on this machine would remove what was abandoned."""
    killed, living = Owner(tmp_path), Owner(tmp_path)
    abandoned, used = killed.folder, living.folder
    killed.tell("die")
    assert (abandoned / "buckets-1").is_file()  # nobody could remove it
    mine = weight_folder(tmp_path)
    try:
        assert not abandoned.exists()
        assert (used / "buckets-1").is_file() and mine.path.is_dir() and mine.path != used
        other = weight_folder(tmp_path)
        assert mine.path.is_dir()
        other.remove()
        assert not other.path.exists() and mine.path.is_dir()
    finally:
        mine.remove()
        living.tell("end")
    weight_folder(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []
