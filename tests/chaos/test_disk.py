"""A run whose disk fills up, or turns read-only, at each of the moments at which it writes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest
from e2e_world import metrics_by_step, run, small_run
from phases import SAMPLER, TRAINER, stopped
from small_disk import SmallDisk, small_disk
from training_process import TrainingProcess, the_error

from verl.errors import CheckpointError
from verl.run import saved_state
from verl.run.run_folder import LOCK

MIB = 2**20
GOING_ON = "resuming after step 1"
SETTINGS = (
    *("trainer.save_freq=1", "trainer.test_freq=-1", "+trainer.val_before_train=false", "data.val_data_num=4"),
    *("trainer.logger=[tensorboard]", "trainer.resume_mode=auto", "trainer.save_timeline=false"),
)
TWO_STEPS = (*SETTINGS, "trainer.total_training_steps=2")
# Nothing but the metrics is written in the second of three steps.
ONLY_METRICS = (*SETTINGS, "trainer.total_training_steps=3", "trainer.save_freq=5", "trainer.save_trajectories=false")


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fill_the_last_block(path: Path, block: int = 4096) -> bytes:
    """By spaces behind the last line, so that another one needs a block that a full disk does not have."""
    text = path.read_bytes().removesuffix(b"\n")
    path.write_bytes(text.ljust(-(-(len(text) + 1) // block) * block - 1) + b"\n")
    return path.read_bytes()


def folders(path: Path) -> list[str]:
    return sorted(child.name for child in path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_disk_that_fills_up_again_and_again(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> None:
    """After each fault the run goes on, into the next one; in the end it is, bit by bit, one that had none."""
    straight = tmp_path / "straight"
    world = (tinywiki, policy, tinywiki_url)
    run(*small_run(*world, straight, *TWO_STEPS))
    export, state = num_bytes(straight / "actor/global_step_1"), num_bytes(saved_state.state_path(straight, 1))
    with small_disk(tmp_path / "disk", 200 * MIB) as disk:
        folder = disk.path / "run"
        copy_of_its_first_step(straight, folder)
        command, log = small_run(*world, folder, *TWO_STEPS), tmp_path / "log"
        before = fill_the_last_block(folder / "metrics.jsonl")
        fail(disk, small_run(*world, folder, *ONLY_METRICS), log, 0, "metrics.jsonl")
        assert (folder / "metrics.jsonl").read_bytes() == before
        # what is left, what cannot be written with that, and what of step 2 is there afterwards
        for leave, name, left in (
            (0, "trajectories/train_step_2.parquet", ()),
            (export + export // 2, "ref/global_step_2", ("actor",)),
            (2 * export + state // 2, "state/.global_step_2.writing/actor", ("actor", "ref")),
        ):
            fail(disk, command, log, leave, name)
            assert folders(folder / "state") == ["global_step_1"], name
            for role in ("actor", "ref"):
                steps = ["global_step_1", *(["global_step_2"] if role in left else [])]
                assert folders(folder / role) == steps, name
                shutil.rmtree(folder / role / "global_step_2", ignore_errors=True)
        fail(disk, command, log, None, "trajectories/train_step_2.parquet")
        fail_at_the_report(disk, command, log)
        run(*command)
        assert sorted(metrics_by_step(folder)) == [1, 2] and "Steps 1 to 2" in (folder / "report.md").read_text()
        for role in ("actor", "ref"):
            one, other = (path / role / "global_step_2" / "model.safetensors" for path in (folder, straight))
            assert one.read_bytes() == other.read_bytes()


def copy_of_its_first_step(straight: Path, folder: Path) -> None:
    """As a run that was killed after it has left it."""
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns("*step_2*", "report.*"))
    metrics = folder / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().splitlines(keepends=True)[0])
    assert list(metrics_by_step(folder)) == [1]


def fail(disk: SmallDisk, command: tuple[str, ...], log: Path, leave: int | None, name: str) -> None:
    """Go on from step 1 and, before anything else is written, leave that many bytes (None: make it read-only)."""
    process = TrainingProcess(command, log)
    try:
        process.wait_until(lambda: GOING_ON in process.said)
        disk.make_read_only() if leave is None else disk.fill(leave)
        assert process.end() == 1, process.said[-6000:]
    finally:
        process.kill()
        disk.make_writable() if leave is None else disk.make_room()
    reason = "the file system is read-only; mount" if leave is None else "the disk is full; make room"
    assert the_error(process.said).startswith(f"error: {disk.path / 'run' / name} could not be written: {reason}")
    assert_first_state(disk.path / "run", process.said, kept=1)


def fail_at_the_report(disk: SmallDisk, command: tuple[str, ...], log: Path) -> None:
    """Only the report is missing in the end."""
    folder = disk.path / "run"
    (folder / "report.png").unlink(missing_ok=True)
    process = TrainingProcess(command, log)
    try:
        process.wait_until((folder / "state" / "global_step_2").is_dir)
        with stopped(psutil.Process(process.process.pid)):  # it is about to write the report
            assert not (folder / "report.png").exists()
            disk.fill()
        assert process.end() == 1, process.said[-6000:]
    finally:
        process.kill()
        disk.make_room()
    assert the_error(process.said).startswith(f"error: {folder / 'report.png'} could not be written: the disk is full")
    assert_first_state(folder, process.said, kept=2)


def assert_first_state(folder: Path, said: str, kept: int) -> None:
    """It is intact, the newest one is named, and no temporary file is left."""
    saved_state.verify(saved_state.state_path(folder, 1))
    newest = saved_state.state_path(folder, kept)
    saved_state.verify(newest)
    if kept == 1:
        assert f"with trainer.resume_mode=auto the run resumes from {newest}" in said
        with pytest.raises(CheckpointError):
            saved_state.verify(saved_state.state_path(folder, 2))
    left = [path for path in folder.rglob(".*") if path.name not in (".metadata", LOCK)]
    assert left == []


@pytest.mark.slow
def test_a_run_folder_that_is_read_only_from_the_start(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", MIB) as disk:
        disk.make_read_only()
        command = small_run(tinywiki, policy, tinywiki_url, disk.path / "run", *TWO_STEPS)
        process, loading, started = TrainingProcess(command, tmp_path / "log"), [], time.monotonic()
        while process.process.poll() is None:
            loading += process.processes(TRAINER) + process.processes(SAMPLER)
            time.sleep(0.2)
        status = process.end()
        print(f"ended with {status} after {time.monotonic() - started:.1f} s")
    assert status == 2 and loading == []  # no worker was there that could load a model
    assert "read-only" in the_error(process.said).lower() and str(disk.path) in the_error(process.said)
