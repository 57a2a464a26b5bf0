"""States on disk: whole or not at all; any damage is found, named, and gone around."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config.trainer import TrainerConfig
from verl.errors import CheckpointError
from verl.storage import digest
from verl.trainer import saved_state
from verl.trainer.resuming import resumes_here, state_to_resume

FILES = {"actor/__0_0.distcp": b"weights" * 100, "actor/.metadata": b"where", "critic/__0_0.distcp": b"values" * 50}


def save(run_dir: Path, step: int) -> Path:
    path = saved_state.state_path(run_dir, step)
    temporary = saved_state.begin(path, ["actor", "critic"], {"step": step, "prompts": {"position": 5}})
    for name, content in FILES.items():
        (temporary / name).write_bytes(content + str(step).encode())
    saved_state.finish(temporary, path, {name: digest(temporary / name) for name in FILES})
    return path


def auto(run_dir: Path) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(run_dir), resume_mode="auto")


def named(run_dir: Path, state: Path) -> TrainerConfig:
    return TrainerConfig(default_local_dir=str(run_dir), resume_mode="resume_path", resume_from_path=str(state))


def test_the_newest_by_number_and_what_it_knows(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "state" / ".global_step_11.writing").mkdir()  # a run that was killed while it wrote
    path, skipped = saved_state.newest(tmp_path)
    assert path == saved_state.state_path(tmp_path, 10) and skipped == []
    assert saved_state.read_progress(path) == {"step": 10, "prompts": {"position": 5}}
    assert state_to_resume(auto(tmp_path)) == path


def test_a_damaged_state_that_is_named_is_an_error(tmp_path: Path) -> None:
    """`auto` goes around it: test_checkpoints.py does all kinds of harm to real states."""
    path = save(tmp_path, 2)
    (path / "actor/.metadata").write_bytes(b"w")
    with pytest.raises(CheckpointError, match=r"global_step_2/actor/\.metadata"):
        state_to_resume(named(tmp_path, path))


def test_a_run_whose_states_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    (save(tmp_path, 1) / saved_state.TRAINER).unlink()
    with pytest.raises(CheckpointError, match="no state in .* can be used .*trainer.json"):
        state_to_resume(auto(tmp_path))


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert state_to_resume(auto(tmp_path)) is None and not resumes_here(auto(tmp_path))
    assert state_to_resume(TrainerConfig(default_local_dir=str(tmp_path))) is None
    with pytest.raises(CheckpointError, match="there is no checkpoint .*global_step_3"):
        state_to_resume(named(tmp_path, tmp_path / "state" / "global_step_3"))


def test_the_published_way_to_name_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    published = tmp_path / "actor" / "global_step_4"
    published.mkdir(parents=True)
    assert state_to_resume(named(tmp_path, published)) == path
    assert resumes_here(named(tmp_path, published)) and not resumes_here(named(tmp_path / "other", published))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = saved_state.state_path(tmp_path, 3)
    temporary = saved_state.begin(path, ["actor"], {"step": 3, "again": True})
    saved_state.finish(temporary, path, {})
    saved_state.verify(path)
    assert saved_state.read_progress(path)["again"] and not (path / "critic").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(CheckpointError, match="check the disk"):
        save(tmp_path, 1)
