"""A file system of its own with little space, for tests of what happens when there is none left."""

from __future__ import annotations

import contextlib
import errno
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
            pytest.skip("a file system of its own may not be mounted here: that needs root")

    def fill(self, leave: int = 0) -> None:
        """Take all space but `leave` bytes."""
        with (self.path / "filler").open("wb") as file:
            while True:
                try:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.path).free - leave)
                    return
                except OSError as error:  # somebody wrote between the two calls
                    if error.errno != errno.ENOSPC:
                        raise

    def make_room(self) -> None:
        (self.path / "filler").unlink()

    def make_read_only(self) -> None:
        """For all that is opened, made, renamed or removed from now on, until `make_writable`.

        By a mount on top. The disk itself cannot be remounted while a file on it is open for writing, which the lock of
        a run's folder always is. That file stays open, as it does where a kernel stops writing to a disk with errors.
        """
        prepared = self.path.with_name(f"{self.path.name}.read_only")
        prepared.mkdir(exist_ok=True)
        _mount("--bind", self.path, prepared)
        _mount("-o", "remount,bind,ro", prepared)
        _mount("--bind", prepared, self.path)  # read-only from its first moment, as what it is a copy of
        subprocess.run(["umount", prepared], check=True)

    def make_writable(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    disk = SmallDisk(path, num_bytes)
    try:
        yield disk
    finally:
        while path.is_mount():
            subprocess.run(["umount", "-l", path], check=True)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)
