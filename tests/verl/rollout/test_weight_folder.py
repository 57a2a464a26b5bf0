"""Folders of weights in shared memory: one per owner, and none outlives its owner for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from verl.rollout.weights.memory import weight_folder

OWNER = """
import os, pathlib, signal, sys
from verl.rollout.weights.memory import weight_folder
folder = weight_folder(pathlib.Path(sys.argv[1]))
(folder.path / "buckets-1").write_bytes(b"1")
print(folder.path, flush=True)
if input() == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    command = [sys.executable, "-c", OWNER, str(parent)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """In a folder of its own: any other owner on this machine would remove what was abandoned."""
    (killed, abandoned), (living, used) = start_owner(tmp_path), start_owner(tmp_path)
    killed.communicate("die\n")
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
        living.communicate("end\n")
    weight_folder(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []
