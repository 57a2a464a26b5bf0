"""Files written beside the next step: in order, bounded in number, errors told, whole when the process is killed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from verl.errors import StorageError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.tracking import background_writer
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.trajectory_store import find_trajectories, read_trajectories, write_trajectories

ROWS, TOKENS = 64, 4000


def trajectories(step: int) -> list[Trajectory]:
    prompt = Prompt((1,), "nq", {})
    ids = tuple((step * token * 7919) % 151_643 for token in range(TOKENS))
    segments = [Segment(Source.PROMPT, (1,)), Segment(Source.POLICY, ids, tuple(-1.0 / (1 + token) for token in ids))]
    return [Trajectory(f"g{row}", prompt, segments, Status.ANSWERED, reward=1.0) for row in range(ROWS)]


def write(folder: Path, step: int) -> None:
    write_trajectories(folder, "train", step, trajectories(step), lambda ids: str(len(ids)))


@contextmanager
def held_up(writer: BackgroundWriter) -> Iterator[threading.Event]:
    """The writer has begun a job that ends when the event is set, or the block is left."""
    begun, go_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go_on.wait()

    writer.hand_over(job)
    assert begun.wait(60)
    try:
        yield go_on
    finally:
        go_on.set()


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    writer = BackgroundWriter(max_jobs=2)
    yield writer
    writer.close()


def test_jobs_run_in_order_beside_the_caller(writer: BackgroundWriter) -> None:
    done: list[int] = []
    with held_up(writer):
        writer.hand_over(lambda: done.append(1))
        assert done == []
    writer.hand_over(lambda: done.append(2))
    writer.hand_over(lambda: done.append(3))
    writer.drain()
    assert done == [1, 2, 3]


def test_a_slow_disk_makes_the_hand_over_wait_and_is_told(
    writer: BackgroundWriter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_writer, "SLOW_S", 0.2)
    done: list[str] = []
    with held_up(writer) as go_on, caplog.at_level(logging.WARNING):
        writer.hand_over(lambda: done.append("waiting"))
        assert caplog.messages == []
        third = threading.Thread(target=writer.hand_over, args=(lambda: done.append("third"),))
        third.start()
        third.join(0.5)
        assert third.is_alive()  # two are kept at most
        go_on.set()
        third.join(60)
    writer.drain()
    assert done == ["waiting", "third"]
    [message] = caplog.messages
    assert message.startswith("waited 0.") and "the disk is slower than a step" in message


def test_an_error_is_raised_by_the_next_hand_over_whose_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "trajectories" / "train_step_1.parquet").mkdir(parents=True)  # a folder where the file has to go
    writer = BackgroundWriter(max_jobs=1)  # so that the second waits until the first is done
    writer.hand_over(partial(write, tmp_path, 1))
    with pytest.raises(StorageError, match=r"train_step_1\.parquet could not be written"):
        writer.hand_over(partial(write, tmp_path, 2))
    writer.drain()  # an error is raised once
    writer.close()
    assert len(read_trajectories(tmp_path / "trajectories" / "train_step_2.parquet", ["step"])) == ROWS


def test_an_error_of_the_last_file_is_raised_at_the_end(writer: BackgroundWriter, tmp_path: Path) -> None:
    (tmp_path / "trajectories").write_text("a file where the folder has to be")
    writer.hand_over(partial(write, tmp_path, 1))
    with pytest.raises(StorageError, match=r"train_step_1\.parquet could not be written"):
        writer.drain()


def test_of_several_errors_the_first_is_raised() -> None:
    writer = BackgroundWriter(max_jobs=3)
    with held_up(writer):
        writer.hand_over(partial(int, "first"))
        writer.hand_over(partial(int, "second"))
    with pytest.raises(ValueError, match="first"):
        writer.drain()
    writer.close()


def test_a_wait_with_a_limit_ends_and_says_so(writer: BackgroundWriter) -> None:
    with held_up(writer), pytest.raises(StorageError, match="1 files were not written within 0 s; check the disk"):
        writer.drain(timeout_s=0.1)
    writer.drain()


def test_a_closed_writer_ends_after_what_it_has(tmp_path: Path) -> None:
    writer = BackgroundWriter()
    with held_up(writer):
        writer.hand_over(partial(write, tmp_path, 1))
        writer.close()
        with pytest.raises(ValueError, match="closed"):
            writer.hand_over(partial(write, tmp_path, 2))
    writer.drain()
    assert list(find_trajectories(tmp_path, "train")) == [1]
    assert wait_for(lambda: "background writer" not in {thread.name for thread in threading.enumerate()})


def test_what_was_written_is_not_kept_in_memory(writer: BackgroundWriter) -> None:
    rows = trajectories(1)
    alive = weakref.ref(rows[0])
    writer.hand_over(partial(len, rows))
    writer.drain()
    del rows
    assert alive() is None


KILLED = """
import sys
from functools import partial
from pathlib import Path
from test_tracking_background_writer import write
from verl.tracking.background_writer import BackgroundWriter
writer = BackgroundWriter()
for step in range(1, 1000):
    writer.hand_over(partial(write, Path(sys.argv[1]), step))
    if step == 3:
        writer.drain()
        print("three are there", flush=True)
"""


def test_a_kill_in_the_middle_of_a_file_leaves_those_before_it_whole(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "three are there\n"
        assert wait_for(lambda: any((tmp_path / "trajectories").glob(".train_step_*.tmp")))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    written = find_trajectories(tmp_path, "train")
    assert list(written) == list(range(1, len(written) + 1)) and len(written) >= 3
    for step, path in written.items():
        rows = read_trajectories(path, ["step", "ids"])
        assert [row["step"] for row in rows] == [step] * ROWS
        assert rows[-1]["ids"] == trajectories(step)[-1].ids


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)
    return condition()
