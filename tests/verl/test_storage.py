"""Writing to a real file system that is full, read-only, or takes less than it is given."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_disk import SmallDisk, small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl.errors import StorageError
from verl.process.storage import append, could_not_write, cut_unfinished_line, whole_file, whole_folder, writing
from verl.run.run_folder import archive
from verl.tracking.backend import Backend, RunInfo
from verl.tracking.jsonl_backend import JsonlBackend
from verl.tracking.tensorboard_backend import TensorboardBackend
from verl.tracking.tracker import Tracker

KIB = 2**10


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 4096 * KIB) as found:
        yield found


def test_a_record_that_does_not_fit_leaves_nothing_of_it(disk: SmallDisk) -> None:
    path = disk.path / "records"
    append(path, b"first\n")
    disk.fill(leave=8 * KIB)
    with pytest.raises(StorageError, match=r"records could not be written: the disk is full; make room there and"):
        append(path, b"x" * 20 * KIB)  # the first part of it fits
    assert path.read_bytes() == b"first\n"
    append(path, b"second\n")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_file_that_does_not_fit_leaves_the_older_one(disk: SmallDisk) -> None:
    path = disk.path / "folder" / "file"
    with whole_file(path) as temporary:
        temporary.write_bytes(b"older")
    disk.fill(leave=8 * KIB)
    with pytest.raises(StorageError, match="folder/file could not be written: the disk is full"), whole_file(path) as t:
        t.write_bytes(b"x" * 20 * KIB)
    assert path.read_bytes() == b"older" and list(path.parent.iterdir()) == [path]


def test_a_folder_appears_whole_or_not_at_all(disk: SmallDisk) -> None:
    path = disk.path / "folders" / "one"
    with pytest.raises(KeyError), whole_folder(path) as made:
        (made / "file").write_bytes(b"x")
        raise KeyError
    disk.fill(leave=8 * KIB)
    with (
        pytest.raises(StorageError, match="folders/one could not be written: the disk is full"),
        whole_folder(path) as m,
    ):
        (m / "file").write_bytes(b"x" * 20 * KIB)
    assert not list(path.parent.iterdir())
    disk.make_room()
    path.mkdir()  # an empty one is replaced
    with whole_folder(path) as made:
        (made / "file").write_bytes(b"x")
        assert not list(path.iterdir())
    assert [*path.parent.iterdir(), *path.iterdir()] == [path, path / "file"]


def test_two_processes_of_one_id_and_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers, where all programs are process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    killed = whole_folder(tmp_path / "folder")
    killed.__enter__()
    with whole_folder(tmp_path / "folder") as made, whole_file(tmp_path / "file") as first:
        (made / "x").touch()
        first.write_text("first")
        with whole_file(tmp_path / "file") as second:
            second.write_text("second")
        assert (tmp_path / "file").read_text() == "second"
    assert (tmp_path / "file").read_text() == "first" and (tmp_path / "folder" / "x").exists()
    mask = os.umask(0o027)
    try:
        with whole_file(tmp_path / "file") as shared:
            shared.touch()
    finally:
        os.umask(mask)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_read_only(disk: SmallDisk) -> None:
    disk.make_read_only()
    with pytest.raises(StorageError, match="the file system is read-only; mount it for writing"):
        append(disk.path / "file", b"x")


def test_a_reason_that_a_library_gives_in_words(disk: SmallDisk) -> None:
    disk.fill(leave=8 * KIB)
    with pytest.raises(Exception, match="os error 28") as raised:
        save_file({"weight": torch.zeros(10_000)}, disk.path / "model.safetensors")
    assert not isinstance(raised.value, OSError)
    disk.make_room()  # as whoever removes the rest of the file does before the message is made
    assert "the disk is full" in could_not_write(disk.path / "model.safetensors", raised.value)


def test_a_library_that_gives_no_reason(disk: SmallDisk, tmp_path: Path) -> None:
    """Then a file system without space is the reason, and one with space is not."""
    error = RuntimeError("unexpected pos 704 vs 598")
    assert "unexpected pos 704 vs 598; check the disk" in could_not_write(tmp_path / "new" / "file", error)
    disk.fill()
    assert "the disk is full" in could_not_write(disk.path / "new" / "file", error)


def test_other_reasons() -> None:
    for number, said in (
        (errno.EDQUOT, "the disk quota is used up; make room"),
        (errno.EACCES, "no permission; allow"),
    ):
        with pytest.raises(StorageError, match=f"^run could not be written: {said} "), writing("run"):
            raise OSError(number, os.strerror(number))


def test_a_line_without_an_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for before, after in ((b'{"step": 1}\n{"st', b'{"step": 1}\n'), (b'{"st', b""), (b"a\nb\n", b"a\nb\n")):
        path.write_bytes(before)
        cut_unfinished_line(path)
        assert path.read_bytes() == after
    cut_unfinished_line(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("backend", [JsonlBackend, TensorboardBackend])
def test_metrics_on_a_full_disk(disk: SmallDisk, backend: type[Backend], capfd: pytest.CaptureFixture[str]) -> None:
    """An error and no traceback on the terminal; what was logged before and what is logged after it can be read."""
    metrics = {f"actor/some_metric_{number}": 0.25 for number in range(200)}  # more than a page
    run = RunInfo("project", "experiment", disk.path / "run", {})
    run.run_dir.mkdir()
    disk.fill(leave=40 * KIB)
    logged = backend(run)
    with pytest.raises(StorageError, match="run/.* could not be written: the disk is full"):
        for step in range(10):
            logged.log(metrics, step)
    assert 0 < step < 9
    logged.finish()
    assert capfd.readouterr() == ("", "")
    disk.make_room()
    again = backend(run)
    again.log(metrics, step)
    again.finish()
    assert steps_in(run.run_dir) == [*range(step + 1)]


def steps_in(run_dir: Path) -> list[int]:
    if (run_dir / "metrics.jsonl").exists():
        return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [event.step for event in events.Scalars("actor/some_metric_199")]


def test_a_run_folder_that_cannot_be_made_or_changed(disk: SmallDisk) -> None:
    run_dir = disk.path / "run"
    with Tracker([], "project", "experiment", run_dir, {}) as tracker:
        tracker.log({"loss": 1.0}, 1)
    disk.make_read_only()
    for act in (
        lambda: archive(run_dir),
        lambda: Tracker([], "project", "experiment", run_dir, {}),
        lambda: Tracker([], "project", "experiment", disk.path / "new", {}),
    ):
        with pytest.raises(StorageError, match="the file system is read-only"):
            act()


def test_standard_output_on_a_full_disk(disk: SmallDisk, tmp_path: Path) -> None:
    program = (
        "import sys; from verl.tracking.tracker import Tracker; from verl.errors import StorageError\n"
        "tracker = Tracker(['console'], 'project', 'experiment', sys.argv[1], {})\n"
        "try:\n"
        "    [tracker.log({'critic/score/mean': 0.5}, step) for step in range(9)]\n"
        "except StorageError as error:\n"
        "    print(error, file=sys.stderr)\n"
    )
    with (disk.path / "log").open("wb") as log:
        disk.fill()
        done = subprocess.run([sys.executable, "-u", "-c", program, str(tmp_path)], stdout=log, stderr=subprocess.PIPE)
    assert done.stderr.decode().splitlines()[0].startswith("standard output could not be written: the disk is full")
