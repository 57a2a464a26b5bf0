"""How an entry point ends."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from verl.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentUnavailable,
    NumericalError,
    RewardError,
    TrainingCollapsed,
    WorkerError,
)
from verl.trainer import main_ppo
from verl.trainer.exit_status import exit_status


def status_of(error: BaseException | None) -> int:
    def run() -> None:
        if error is not None:
            raise error

    return exit_status(run, when_interrupted="all is kept")


NEEDS_A_PERSON = (ConfigError, DataError, RewardError, TrainingCollapsed)
MAY_PASS = (CheckpointError, EnvironmentUnavailable, NumericalError, WorkerError)


@pytest.mark.parametrize("kind", [*NEEDS_A_PERSON, *MAY_PASS])
def test_what_a_person_has_to_change_is_2_and_what_may_pass_1(kind: type[Exception]) -> None:
    assert status_of(kind("x")) == (2 if kind in NEEDS_A_PERSON else 1)


def test_the_end_the_interruption_and_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(None) == 0
    assert status_of(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted: all is kept\n"
    with pytest.raises(ZeroDivisionError):
        status_of(ZeroDivisionError())


def test_one_line_without_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    status_of(DataError("http://user:hunter2-hunter2@h/x is gone"))
    assert capsys.readouterr().err == "error: http://***@h/x is gone\n"


def test_the_last_words_of_an_interrupted_run_agree_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> NoReturn:
        raise KeyboardInterrupt

    own = [f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    assert main_ppo.main(own, adapt=interrupt) == 130
    assert capsys.readouterr().err == "interrupted: nothing was started\n"
    monkeypatch.setattr(main_ppo, "run", interrupt)
    assert main_ppo.main(own) == 130
    said = capsys.readouterr().err
    assert (
        said.startswith("interrupted: no checkpoint was saved yet") and "intact" not in said and said.count("\n") == 1
    )
    (tmp_path / "state" / "global_step_7").mkdir(parents=True)
    assert main_ppo.main(own) == 130
    assert capsys.readouterr().err.endswith(f"resumes from {tmp_path}/state/global_step_7\n")
