"""A driver that hangs outside of its waits ends, and its descendants with it; one that gets things done does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

DRIVER = """
import subprocess, sys, time
from verl.single_controller.progress import note_progress
from verl.trainer.watchdog import Watchdog

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
watchdog = Watchdog(4.0, lambda seconds: print(f"stalled {seconds:.1f}", flush=True))
if "stop" in sys.argv:
    watchdog.stop()
    time.sleep(6)
    print("left alone", flush=True)
    child.kill()
    sys.exit(0)
for _ in range(30):
    time.sleep(0.2)
    note_progress()
print("worked", flush=True)
time.sleep(600)
"""


def run(*arguments: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


def test_a_hanging_driver_is_ended_with_its_descendants() -> None:
    status, (child, *lines) = run()
    assert status == 1 and lines[0] == "worked" and lines[1].startswith("stalled ") and len(lines) == 2
    assert 4.0 <= float(lines[1].split()[1]) < 4.0 + 20
    assert not psutil.pid_exists(int(child)) or psutil.Process(int(child)).status() == psutil.STATUS_ZOMBIE


def test_a_stopped_watchdog_leaves_the_driver_alone() -> None:
    status, lines = run("stop")
    assert status == 0 and lines[1:] == ["left alone"]


WAITING = """
from ahead_world import World
from verl.trainer.watchdog import Watchdog

watchdog = Watchdog(2.0, lambda seconds: print("stalled", flush=True))
World(1, 2).take(1)  # its sampler is let go by nobody
"""


def test_a_loop_that_waits_for_a_thread_that_hangs_is_ended() -> None:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", WAITING], env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "stalled\n"), done.stderr
