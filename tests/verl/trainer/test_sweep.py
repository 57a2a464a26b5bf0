"""Sweeps: one process and one folder a run, resumed by the same command, a table at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from verl.config import Config, load_config
from verl.config.loading.run import load_sft_config
from verl.config.sections.schema import SftConfig
from verl.errors import ConfigError, StorageError, SweepIncomplete
from verl.trainer.sweep import FINISHED, mean_and_interval, sweep

HELPERS = Path(__file__).resolve().parents[2] / "helpers"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    paths = [str(HELPERS), str(HELPERS.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path


def run(*overrides: str) -> str:
    path = sweep(
        "swept_program", Config, ["-m", "trainer.default_local_dir=runs/é", *overrides], "ppo_trainer", load_config
    )
    return path.read_text(encoding="utf-8")


def started(folder: Path) -> list[str]:
    return (folder / "started").read_text().splitlines()


def test_mean_and_interval_by_hand() -> None:
    # Standard deviation 1, so half the width is 4.303 / sqrt(3) = 2.484; of two values 12.706 * sqrt(0.5) / sqrt(2).
    assert mean_and_interval([1.0, 2.0, 3.0]) == "2 [-0.4843, 4.484]"
    assert mean_and_interval([0.0, 1.0]) == "0.5 [-5.853, 6.853]"
    assert (mean_and_interval([0.25]), mean_and_interval([])) == ("0.25", "")


def test_runs_have_folders_and_names_and_a_table_with_the_mean_over_seeds(folder: Path) -> None:
    text = run("trainer.seed=0,1,2", "max_turns=1,2", "trainer.experiment_name=nq")
    assert started(folder)[:2] == ["0 nq-seed=0,max_turns=1 auto", "0 nq-seed=0,max_turns=2 auto"]
    assert sorted(path.name for path in (folder / "runs/é").iterdir() if path.is_dir())[0] == "seed=0,max_turns=1"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == ["run", "step", "validation", "status"]
    assert ["seed=1,max_turns=2", "7", "2", "finished"] in lines
    assert lines[-1] == ["mean of 3 seeds, max_turns=2", "", "2 [-0.4843, 4.484]", ""]


def test_a_run_that_fails_keeps_none_from_running_and_is_tried_again(folder: Path) -> None:
    (folder / "orders").write_text("1 fail\n")
    with pytest.raises(SweepIncomplete, match=r"1 of 3 runs failed: seed=1 \(status 3\)"):
        run("trainer.seed=0,1,2")
    assert "failed (3)" in (folder / "runs/é/sweep.md").read_text()
    (folder / "orders").unlink()
    assert "mean of 3 seeds" in run("trainer.seed=0,1,2")
    assert [line.split()[0] for line in started(folder)] == ["0", "1", "2", "1"]


def test_more_seeds_and_more_steps_are_added(folder: Path) -> None:
    run("trainer.seed=0,1")
    run("trainer.seed=0,1,2")
    assert [line.split()[0] for line in started(folder)] == ["0", "1", "2"]
    run("trainer.seed=0,1", "trainer.total_training_steps=20")
    assert [line.split()[0] for line in started(folder)] == ["0", "1", "2", "0", "1"]


def test_runs_of_other_settings_are_not_taken_for_these(folder: Path) -> None:
    run("trainer.seed=0,1")
    with pytest.raises(ConfigError, match=r"seed=0 holds a run with other settings: max_turns: 10 -> 5"):
        run("trainer.seed=0,1", "max_turns=5")
    assert len(started(folder)) == 2


def test_an_unfinished_warm_start_resumes_and_other_settings_are_refused(folder: Path) -> None:
    def warm_starts(*overrides: str) -> Path:
        return sweep("swept_program", SftConfig, ["-m", "trainer.seed=0,1", *overrides], "sft", load_sft_config)

    (folder / "orders").write_text("1 fail\n")
    with pytest.raises(SweepIncomplete, match=r"1 of 2 runs failed: seed=1 \(status 3\)"):
        warm_starts()
    with pytest.raises(ConfigError, match=r"seed=0 holds a run with other settings: optim.lr: 0.001 -> 0.1"):
        warm_starts("optim.lr=0.1")
    (folder / "orders").unlink()
    warm_starts("trainer.resume_mode=auto")
    assert started(folder) == ["0 never auto", "1 never auto", "1 never auto"]


def test_all_settings_are_checked_before_the_first_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_turns"):
        run("max_turns=1,2,two")
    assert not (folder / "started").exists()


def test_folders_that_follow_from_a_swept_value_are_kept(folder: Path) -> None:
    sweep(
        "swept_program",
        Config,
        ["-m", "trainer.seed=3,4", "hydra.sweep.dir=at/${trainer.seed}"],
        "ppo_trainer",
        load_config,
    )
    assert (folder / "at/3/metrics.jsonl").exists() and (folder / "at/sweep.md").exists()


def test_folders_may_be_given_from_the_root_and_from_here(folder: Path) -> None:
    given = f"trainer.default_local_dir={folder}/a,b"
    path = sweep("swept_program", Config, ["-m", given], "ppo_trainer", load_config)
    assert path == folder / "sweep.md" and (folder / "a/metrics.jsonl").exists() and (folder / "b").is_dir()


def test_where_the_table_cannot_be_is_told_before_the_first_run(folder: Path) -> None:
    apart = ["-m", f"trainer.default_local_dir={folder}/a,/nowhere/b"]
    with pytest.raises(ConfigError, match="have only / in common, where the table of the sweep would be written"):
        sweep("swept_program", Config, apart, "ppo_trainer", load_config)
    (folder / "runs/é" / FINISHED).mkdir(parents=True)
    with pytest.raises(StorageError, match=rf"{FINISHED} could not be written"):
        run("trainer.seed=0,1")
    assert not (folder / "started").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_in_hand_and_the_sweep(folder: Path, number: signal.Signals) -> None:
    (folder / "orders").write_text("1 wait\n")
    program = (
        "import sys; from verl.config import Config, load_config; from verl.process.interrupts import heed_interrupts; "
        "from program_end import exit_status; from verl.trainer.sweep import sweep; heed_interrupts(); "
        "arguments = 'swept_program', Config, ['-m', 'trainer.seed=0,1,2'], 'ppo_trainer', load_config; "
        "sys.exit(exit_status(lambda: sweep(*arguments), 'the same command resumes'))"
    )
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    deadline = time.monotonic() + 60
    while not (folder / "started").exists() or len(started(folder)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: interrupted here" in said and said.rstrip().endswith("interrupted: the same command resumes")
    assert [line.split()[0] for line in started(folder)] == ["0", "1"]
