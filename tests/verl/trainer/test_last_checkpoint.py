"""Which checkpoint of a run a script gets, from folders as runs leave them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl.errors import DataError
from verl.trainer import saved_state
from verl.trainer.last_checkpoint import best_checkpoint, last_checkpoint, main


def save(run_dir: Path, step: int, best: int | None = None, roles: tuple[str, ...] = ("actor",)) -> None:
    for role in roles:
        (run_dir / role / f"global_step_{step}").mkdir(parents=True)
        (run_dir / role / f"global_step_{step}" / "config.json").write_text("{}")
    path = saved_state.state_path(run_dir, step)
    saved_state.finish(saved_state.begin(path, ["actor"], {"step": step, "best": best}), path, {})


def test_the_last_is_the_highest_step_with_a_whole_model(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step, roles=("actor", "critic"))
    (tmp_path / "actor" / "global_step_200").mkdir()  # no model in it
    (tmp_path / "actor" / ".global_step_300.writing").mkdir()
    (tmp_path / "actor" / "global_step_400_mine").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "actor" / "global_step_100"
    assert last_checkpoint(str(tmp_path), "critic") == tmp_path / "critic" / "global_step_100"
    with pytest.raises(DataError, match="has no saved ref"):
        last_checkpoint(tmp_path, "ref")


def test_the_best_is_what_the_newest_readable_state_says(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(DataError, match=r"no validated checkpoint.*trainer\.test_freq"):
        best_checkpoint(tmp_path)
    save(tmp_path, 20, best=20)
    save(tmp_path, 30, best=20)
    save(tmp_path, 40, best=40)
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
    save(tmp_path, 3)
    program = (
        "import sys; from verl.trainer.last_checkpoint import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/actor/global_step_3\n"), done.stderr
