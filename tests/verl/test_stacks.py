"""A process tells what it is doing, also while it hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.stacks import collect_stacks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STUCK = """
import threading, time
from verl.stacks import offer_stacks
offer_stacks()
offer_stacks()
entered = threading.Event()
def second_thread():
    entered.set()
    time.sleep(600)
def main_thread():
    print("ready", flush=True)
    sum(range(10**12))  # a native call that never gives the interpreter's lock away
threading.Thread(target=second_thread, daemon=True).start()
entered.wait()
main_thread()
"""


def test_all_threads_of_a_stuck_descendant_and_no_one_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.stacks.ANSWER_S", 60.0)
    silent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    stuck = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE)
    try:
        assert stuck.stdout is not None and stuck.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        for _ in range(2):  # asked twice, each answer stands alone
            found = [path for path in collect_stacks(tmp_path) if path.stem.endswith(f"-{stuck.pid}")]
            assert len(found) == 1
            text = found[0].read_text()
            assert text.count("in main_thread") == 1 and text.count("in second_thread") == 1
        assert silent.poll() is None and stuck.poll() is None
        assert not list(tmp_path.glob(f"*-{silent.pid}.txt"))
    finally:
        for process in (silent, stuck):
            process.kill()
            process.wait()
