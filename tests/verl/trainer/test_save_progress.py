"""How far a checkpoint is: by the bytes that other processes have written so far."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import long_task
from long_task import Progress
from verl.trainer import save_progress
from verl.trainer.save_progress import saving


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each state of the display while something is saved."""
    seen: list[str] = []
    reach = Progress.reach

    def noted(self: Progress, done: int, note: str | None = None) -> None:
        reach(self, done, note)
        seen.append(f"{self.what}: {self.counts()}, {self.pace()}")
        changed.set()

    changed = threading.Event()
    monkeypatch.setattr(Progress, "reach", noted)
    monkeypatch.setattr(Progress, "changed", changed, raising=False)
    monkeypatch.setattr(save_progress, "LOOK_S", 0.01)
    return seen


def write(folder: Path, name: str, num_bytes: int) -> None:
    """As a worker does, and wait until it was seen."""
    Progress.changed.clear()  # type: ignore[attr-defined]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bytes(num_bytes))
    assert Progress.changed.wait(60)  # type: ignore[attr-defined]


def test_it_becomes_as_large_as_the_checkpoint_before(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "actor/global_step_9").mkdir(parents=True)
    (tmp_path / "actor/global_step_9/model.safetensors").write_bytes(bytes(2_000_000))
    with saving(tmp_path / "actor/global_step_10", expected=17):
        write(tmp_path / "actor/.global_step_10.writing", "model.safetensors", 500_000)
        write(tmp_path / "actor/.global_step_10.writing/adapter", "adapter.safetensors", 500_000)
    assert re.fullmatch(r"save actor/global_step_10: 500.0 kB of 2.0 MB, \S+ [kMG]?B a second, \d+ s left", told[0])
    assert told[-1].startswith("save actor/global_step_10: 1.0 MB of 2.0 MB")


@pytest.mark.parametrize(("expected", "counts"), [(4_000_000, "1.0 MB of 4.0 MB"), (None, "1.0 MB")])
def test_the_first_one(tmp_path: Path, told: list[str], expected: int | None, counts: str) -> None:
    with saving(tmp_path / "state/global_step_1", expected):
        write(tmp_path / "state/.global_step_1.writing", "shard", 1_000_000)
    assert told[-1].startswith(f"save state/global_step_1: {counts}, ")
    assert ("left" in told[-1]) == (expected is not None)


def test_a_quick_one_is_not_worth_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert long_task.SHORT_S > 0.5
    with saving(tmp_path / "actor/global_step_1", 1000):
        (tmp_path / "actor/.global_step_1.writing").mkdir(parents=True)
    assert not capsys.readouterr().err
