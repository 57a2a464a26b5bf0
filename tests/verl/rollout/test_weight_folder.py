"""Folders of weights in shared memory: one per owner, and none outlives its owner for long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from verl.rollout.weight_file import WeightFolder

OWNER = """
import os, signal
from verl.rollout.weight_file import WeightFolder
folder = WeightFolder()
(folder.path / "weights-1.safetensors").write_bytes(b"1")
print(folder.path, flush=True)
if input() == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_what_a_killed_owner_left_is_removed_and_a_living_ones_is_not() -> None:
    (killed, abandoned), (living, used) = start_owner(), start_owner()
    killed.communicate("die\n")
    assert (abandoned / "weights-1.safetensors").is_file()  # nobody could remove it
    mine = WeightFolder()
    try:
        assert not abandoned.exists()
        assert (used / "weights-1.safetensors").is_file() and mine.path.is_dir() and mine.path != used
        other = WeightFolder()
        assert mine.path.is_dir()
        other.remove()
        assert not other.path.exists() and mine.path.is_dir()
    finally:
        mine.remove()
        living.communicate("end\n")
    WeightFolder().remove()
    assert not used.exists()
