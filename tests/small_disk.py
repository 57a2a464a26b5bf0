"""A file system of its own with little space, for tests of what happens when there is none left."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A tmpfs at `path`. Skips the test where none may be mounted."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)]
        done = subprocess.run(mount, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a file system of its own may not be mounted here: {done.stderr.strip()}")

    def fill(self, leave: int = 0) -> None:
        """Take all space but `leave` bytes."""
        with (self.path / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.path).free - leave)

    def make_room(self) -> None:
        (self.path / "filler").unlink()

    def remount(self, how: str) -> None:
        """`how`: "ro" or "rw"."""
        subprocess.run(["mount", "-o", f"remount,{how}", self.path], check=True)


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(path, num_bytes)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", path], check=True)
