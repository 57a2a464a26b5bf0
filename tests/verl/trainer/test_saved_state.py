"""States and checkpoints on disk: whole or not at all, which one a script gets, and how far one is."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import long_task
from long_task import Progress
from verl.config.sections.trainer import TrainerConfig
from verl.errors import CheckpointError, DataError
from verl.process.storage import digest
from verl.run import saved_state
from verl.run.last_checkpoint import best_checkpoint, last_checkpoint, main
from verl.run.resuming import check_folder, prepare_folder, resumes_here, state_to_resume
from verl.run.saved_state import saving

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
    save(tmp_path, 2)
    for gone in ("state/global_step_3", "actor/global_step_3", "global_step_3"):
        with pytest.raises(CheckpointError, match=f"there is no checkpoint .*{gone}; .*state has global_step_2"):
            state_to_resume(named(tmp_path, tmp_path / gone))


def test_the_published_way_to_name_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    published = tmp_path / "actor" / "global_step_4"
    published.mkdir(parents=True)
    assert state_to_resume(named(tmp_path, published)) == path
    assert state_to_resume(named(tmp_path, tmp_path / "global_step_4")) == path  # as veRL names it
    assert resumes_here(named(tmp_path, published)) and not resumes_here(named(tmp_path / "other", published))


@pytest.mark.parametrize("written", ["global_step_4", "latest", "../state/global_step_4", "../actor/global_step_4"])
def test_other_ways_to_name_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    path = save(tmp_path, 4)
    path.with_name("latest").symlink_to("global_step_4")
    monkeypatch.chdir(path.parent)
    trainer = named(tmp_path, Path(written))
    assert state_to_resume(trainer) == path and resumes_here(trainer)
    prepare_folder(trainer)
    assert path.is_dir()


@pytest.mark.parametrize("written", ["run", "run/state", "other/global_step_4", "run/state/global_step_x", "/"])
def test_a_folder_that_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    save(tmp_path / "run", 4)
    for name in ("other/global_step_4", "run/state/global_step_x"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a run: name its folder state/global_step_N"):
        check_folder(named(tmp_path / "new", Path(written)))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = saved_state.state_path(tmp_path, 3)
    temporary = saved_state.begin(path, ["actor"], {"step": 3, "again": True})
    saved_state.finish(temporary, path, {})
    saved_state.verify(path)
    assert saved_state.read_progress(path)["again"] and not (path / "critic").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(CheckpointError, match="a file has the name of its folder; move it away"):
        save(tmp_path, 1)


def save_model(run_dir: Path, step: int, best: int | None = None, roles: tuple[str, ...] = ("actor",)) -> None:
    for role in roles:
        (run_dir / role / f"global_step_{step}").mkdir(parents=True)
        (run_dir / role / f"global_step_{step}" / "config.json").write_text("{}")
    path = saved_state.state_path(run_dir, step)
    saved_state.finish(saved_state.begin(path, ["actor"], {"step": step, "best": best}), path, {})


def test_the_last_is_the_highest_step_with_a_whole_model(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save_model(tmp_path, step, roles=("actor", "critic"))
    (tmp_path / "actor" / "global_step_200").mkdir()  # no model in it
    (tmp_path / "actor" / ".global_step_300.writing").mkdir()
    (tmp_path / "actor" / "global_step_400_mine").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "actor" / "global_step_100"
    assert last_checkpoint(str(tmp_path), "critic") == tmp_path / "critic" / "global_step_100"
    with pytest.raises(DataError, match="has no saved ref"):
        last_checkpoint(tmp_path, "ref")


def test_the_best_is_what_the_newest_readable_state_says(tmp_path: Path) -> None:
    save_model(tmp_path, 10)
    with pytest.raises(DataError, match=r"no validated checkpoint.*trainer\.test_freq"):
        best_checkpoint(tmp_path)
    save_model(tmp_path, 20, best=20)
    save_model(tmp_path, 30, best=20)
    save_model(tmp_path, 40, best=40)
    (saved_state.state_path(tmp_path, 40) / "trainer.json").write_text("{")
    assert best_checkpoint(tmp_path) == tmp_path / "actor" / "global_step_20"


def test_the_folder_of_a_warm_start(tmp_path: Path) -> None:
    (tmp_path / "global_step_60").mkdir()
    (tmp_path / "global_step_60" / "config.json").write_text("{}")
    assert last_checkpoint(tmp_path) == tmp_path / "global_step_60"


def test_a_folder_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2 and "has no saved actor" in capsys.readouterr().err
    assert main([str(tmp_path / "gone"), "--best"]) == 2 and "there is no folder" in capsys.readouterr().err


def test_the_command_prints_the_path_alone_and_imports_nothing_heavy(tmp_path: Path) -> None:
    save_model(tmp_path, 3)
    program = (
        "import sys; from verl.run.last_checkpoint import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/actor/global_step_3\n"), done.stderr


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
    monkeypatch.setattr(saved_state, "LOOK_S", 0.01)
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
