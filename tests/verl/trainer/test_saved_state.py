"""States on disk: whole or not at all; any damage is found, named, and gone around."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import load_config
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


def settings(run_dir: Path, *overrides: str):
    config = load_config("ppo_trainer", [f"trainer.default_local_dir={run_dir}", *overrides])
    return config.trainer


AUTO = "trainer.resume_mode=auto"


def test_the_newest_by_number_and_what_it_knows(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    (tmp_path / "state" / ".global_step_11.writing").mkdir()  # a run that was killed while it wrote
    path, skipped = saved_state.newest(tmp_path)
    assert path == saved_state.state_path(tmp_path, 10) and skipped == []
    assert saved_state.read_progress(path) == {"step": 10, "prompts": {"position": 5}}
    assert state_to_resume(settings(tmp_path, AUTO)) == path


@pytest.mark.parametrize("name", [*FILES, saved_state.TRAINER, saved_state.MANIFEST])
@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "empty"])
def test_damage_anywhere_is_named_and_the_state_before_is_taken(
    tmp_path: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes({"cut": content[:-3], "flip": content, "empty": b""}[harm])
    assert state_to_resume(settings(tmp_path, AUTO)) == good
    assert "global_step_2" in caplog.text
    if name != saved_state.MANIFEST:  # a broken manifest may read as one that lists other things
        assert f"global_step_2/{name}" in caplog.text
    with pytest.raises(CheckpointError, match="global_step_2"):
        state_to_resume(
            settings(tmp_path, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={file.parent}")
        )


def test_a_run_whose_states_are_all_damaged_does_not_start_anew(tmp_path: Path) -> None:
    (save(tmp_path, 1) / saved_state.TRAINER).unlink()
    with pytest.raises(CheckpointError, match="no state in .* can be used .*trainer.json"):
        state_to_resume(settings(tmp_path, AUTO))


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    assert state_to_resume(settings(tmp_path, AUTO)) is None and not resumes_here(settings(tmp_path, AUTO))
    assert state_to_resume(settings(tmp_path)) is None
    absent = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'state' / 'global_step_3'}")
    with pytest.raises(CheckpointError, match="there is no checkpoint .*global_step_3"):
        state_to_resume(settings(tmp_path, *absent))


def test_the_published_way_to_name_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    (tmp_path / "actor" / "global_step_4").mkdir(parents=True)
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'actor' / 'global_step_4'}")
    assert state_to_resume(settings(tmp_path, *named)) == path
    assert resumes_here(settings(tmp_path, *named)) and not resumes_here(settings(tmp_path / "other", *named))


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
