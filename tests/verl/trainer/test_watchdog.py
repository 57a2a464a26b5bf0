"""A driver that hangs or is killed: its descendants end, and its newest state is named."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from ahead_world import World
from forked import ranks
from phases import wait_for_end

from verl.process.watchdog import Watchdog
from verl.run.process_cleanup import ProcessCleanup

HANGING = """
import subprocess, sys, time
from verl.process.watchdog import note_progress
from verl.process.watchdog import Watchdog

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
watchdog = Watchdog(4.0, lambda seconds: print(f"stalled {seconds:.1f}", flush=True))
for _ in range(30):
    time.sleep(0.2)
    note_progress()
print("worked", flush=True)
time.sleep(600)
"""


def test_a_hanging_driver_is_ended_with_its_descendants() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=280)
    child, *lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0] == "worked" and lines[1].startswith("stalled ") and len(lines) == 2
    assert 4.0 <= float(lines[1].split()[1]) < 4.0 + 60
    wait_for_end(int(child))


@pytest.mark.timeout(60)
def test_a_stopped_watchdog_is_no_more() -> None:
    Watchdog(1e6, lambda seconds: None).stop()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def wait_for_a_sampler(rank: int, sender: Connection) -> None:
    Watchdog(2.0, lambda seconds: sender.send("stalled"))
    World(1, 2).take(1)  # its sampler is let go by nobody


def test_a_loop_that_waits_for_a_thread_that_hangs_is_ended() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with ranks(1, wait_for_a_sampler, sender) as [loop]:
        loop.join(280)
        assert loop.exitcode == 1 and receiver.poll() and receiver.recv() == "stalled"


KILLED = """
import pathlib, subprocess, sys
from verl.run.process_cleanup import ProcessCleanup

cleanup = ProcessCleanup(pathlib.Path(sys.argv[1]))
watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
cleanup.watch()
later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(watched.pid, later.pid, cleanup._process.pid, flush=True)
if input() == "stop":
    cleanup.stop()
    print("stopped", flush=True)
input()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_only_what_was_watched_is_ended_and_only_after_a_death(stopped: bool, tmp_path: Path) -> None:
    (tmp_path / "state/global_step_9").mkdir(parents=True)
    (tmp_path / "state/global_step_10").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], **pipes, text=True)
    assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
    watched, later, cleanup = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        if stopped:
            driver.stdin.write("stop\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "stopped\n" and not cleanup.is_running()
        driver.kill()
        driver.wait()
        # A cleanup that has ended already ends nobody any more.
        gone, _ = psutil.wait_procs([watched, cleanup], timeout=1 if stopped else 120)
        assert (watched in gone) is not stopped and not cleanup.is_running()
        assert later.is_running()
    finally:
        for process in (watched, later):
            if process.is_running():
                process.kill()
    words = driver.stderr.read()  # its end comes with that of the last process
    assert ("the driver ended without a message" in words) is not stopped
    assert (f"resumes from {tmp_path / 'state/global_step_10'}\n" in words) is not stopped


def test_a_dead_cleanup_is_no_concern_of_the_driver(tmp_path: Path) -> None:
    cleanup = ProcessCleanup(tmp_path)
    cleanup._process.kill()
    assert cleanup._process.wait() < 0
    cleanup.watch()
    cleanup.stop()
    assert cleanup._process.stdin is not None and cleanup._process.stdin.closed  # and nothing was raised
