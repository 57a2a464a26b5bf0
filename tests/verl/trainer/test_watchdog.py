"""A driver that hangs outside of its waits ends, and its descendants with it; one that gets things done does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from verl.trainer.watchdog import Watchdog

DRIVER = """
import subprocess, sys, time
from verl.single_controller.progress import note_progress
from verl.trainer.watchdog import Watchdog

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
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=280)
    child, *lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0] == "worked" and lines[1].startswith("stalled ") and len(lines) == 2
    assert 4.0 <= float(lines[1].split()[1]) < 4.0 + 60
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.timeout(60)
def test_a_stopped_watchdog_is_no_more() -> None:
    Watchdog(1e6, lambda seconds: None).stop()
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


WAITING = """
from ahead_world import World
from verl.trainer.watchdog import Watchdog

watchdog = Watchdog(2.0, lambda seconds: print("stalled", flush=True))
World(1, 2).take(1)  # its sampler is let go by nobody
"""


def test_a_loop_that_waits_for_a_thread_that_hangs_is_ended() -> None:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", WAITING], env=variables, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (1, "stalled\n"), done.stderr
