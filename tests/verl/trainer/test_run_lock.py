"""Two runs at once in a folder: the second is refused while the first lives, however that one ends."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.errors import ConfigError, StorageError
from verl.trainer import sft
from verl.trainer.main_ppo import main as main_ppo
from verl.trainer.preflight.__main__ import main as preflight
from verl.trainer.run_lock import LOCK, check_not_in_use, run_lock

HOLDER = """
import sys
from pathlib import Path
from verl.trainer.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process whose run has the folder."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_run_is_refused_until_the_first_is_killed(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    run_dir = tmp_path / "run"
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"run is in use by another run \(process {running.pid} on .+ANOTHER"):
            check_not_in_use(run_dir)
        with pytest.raises(ConfigError, match=rf"\(process {running.pid} on "), run_lock(run_dir):
            pass
    running.send_signal(signal.SIGKILL)
    running.wait()
    check_not_in_use(run_dir)
    with run_lock(run_dir), pytest.raises(ConfigError, match="in use"):
        check_not_in_use(run_dir)
    check_not_in_use(run_dir)


@pytest.mark.usefixtures("no_dry_run")
def test_every_program_that_writes_a_run_says_so_first(
    tmp_path: Path, running: subprocess.Popen[str], tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no data: the folder is what is named."""
    where = f"trainer.default_local_dir={tmp_path / 'run'}"
    rl = [
        "data.train_files=gone.parquet",
        f"actor_rollout_ref.model.path={tiny_model_dir}",
        "trainer.device=cpu",
        where,
    ]
    rl += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=5"]
    assert main_ppo(rl) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert main_ppo([*rl, "trainer.overwrite=archive"]) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert sft.main(["model.path=/gone", "data.train_files=gone.parquet", where]) == 2
    assert f"process {running.pid} on" in capsys.readouterr().err
    assert preflight(rl) == 1
    assert f"FAIL start: {tmp_path / 'run'} is in use by another run (process {running.pid}" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_free_and_is_made(tmp_path: Path) -> None:
    check_not_in_use(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()
    with run_lock(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / LOCK).is_file()
    (tmp_path / "file").touch()
    check_not_in_use(tmp_path / "file")
    with pytest.raises(StorageError, match="file"), run_lock(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_lock(tmp_path):
        assert "No locks available" in caplog.text
