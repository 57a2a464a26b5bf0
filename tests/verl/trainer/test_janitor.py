"""What a killed driver leaves behind is ended and its newest state named; a driver that stopped is left in peace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from verl.trainer.janitor import Janitor

DRIVER = """
import pathlib, subprocess, sys
from verl.trainer.janitor import Janitor

janitor = Janitor(pathlib.Path(sys.argv[1]))
watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
janitor.watch()
later = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(watched.pid, later.pid, janitor._process.pid, flush=True)
if input() == "stop":
    janitor.stop()
    print("stopped", flush=True)
input()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_only_what_was_watched_is_ended_and_only_after_a_death(stopped: bool, tmp_path: Path) -> None:
    (tmp_path / "state/global_step_9").mkdir(parents=True)
    (tmp_path / "state/global_step_10").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], **pipes, text=True)
    assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
    watched, later, janitor = (psutil.Process(int(pid)) for pid in driver.stdout.readline().split())
    try:
        if stopped:
            driver.stdin.write("stop\n")
            driver.stdin.flush()
            assert driver.stdout.readline() == "stopped\n" and not janitor.is_running()
        driver.kill()
        driver.wait()
        # A janitor that has ended already ends nobody any more.
        gone, _ = psutil.wait_procs([watched, janitor], timeout=1 if stopped else 120)
        assert (watched in gone) is not stopped and not janitor.is_running()
        assert later.is_running()
    finally:
        for process in (watched, later):
            if process.is_running():
                process.kill()
    words = driver.stderr.read()  # its end comes with that of the last process
    assert ("the driver ended without a message" in words) is not stopped
    assert (f"resumes from {tmp_path / 'state/global_step_10'}\n" in words) is not stopped


def test_a_dead_janitor_is_no_concern_of_the_driver(tmp_path: Path) -> None:
    janitor = Janitor(tmp_path)
    janitor._process.kill()
    assert janitor._process.wait() < 0
    janitor.watch()
    janitor.stop()
    assert janitor._process.stdin is not None and janitor._process.stdin.closed  # and nothing was raised
