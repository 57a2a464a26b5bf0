"""What a process says and shows of itself: its start, its stacks, its threads and its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from verl.process import startup
from verl.process.event_loop import run_to_end
from verl.process.startup import engine_threads, rank_threads, usable_cores, usable_memory
from verl.process.watchdog import collect_stacks

PROGRAM = """
from verl.process.startup import log_to_stderr, phase
log_to_stderr()
import logging, warnings
with phase("importing torch"):
    import torch
logging.getLogger("torch._library.triton").warning("noise")
logging.getLogger("httpx").info("noise")
logging.getLogger("vllm.triton_utils.importing").info("noise")
import bm25s
bm25s.logger.debug("noise")  # it made itself talkative
logging.getLogger("torch._dynamo").warning("of torch")
logging.getLogger("httpx").warning("of a request")
logging.getLogger("verl.trainer.collapse_guard").warning("of ours")
warnings.warn("of a caller")
print("answer")
raise RuntimeError("at the end")
"""


def test_phases_and_what_can_be_acted_on_go_to_standard_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "answer\n"
    assert re.search(
        r"^\d\d:\d\d:\d\d INFO verl.process.startup: \[ *\d+ s\] importing torch$", done.stderr, re.MULTILINE
    )
    assert "noise" not in done.stderr
    for told in ("of torch", "of a request", "of ours", "UserWarning: of a caller", "RuntimeError: at the end"):
        assert told in done.stderr, told


def test_a_long_phase_tells_that_it_is_still_going_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "BEAT_S", 0.01)
    seen = threading.Event()

    class Beats(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "so far" in record.getMessage():
                seen.set()

    handler = Beats()
    startup.log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "verl.process.startup"), startup.phase("loading a model"):
            assert seen.wait(60)
        told = len(caplog.records)
    finally:
        startup.log.removeHandler(handler)
    assert re.fullmatch(r"\[ *\d+ s\] loading a model", caplog.messages[0])
    assert all(re.fullmatch(r"\[ *\d+ s\] loading a model: \d+ s so far", text) for text in caplog.messages[1:])
    assert len(caplog.records) == told  # and no more once it is over


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_LOGGING_LEVEL": "DEBUG"})
    startup.before_libraries()
    assert os.environ == startup.ENGINE_VARIABLES | {"VLLM_LOGGING_LEVEL": "DEBUG"}


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STUCK = """
import threading, time
from verl.process.watchdog import offer_stacks
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
    monkeypatch.setattr("verl.process.watchdog.ANSWER_S", 60.0)
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


OWN_STACKS = """
import sys
from pathlib import Path
from verl.process.watchdog import collect_stacks, offer_stacks
closed_later = open("/dev/null")
offer_stacks()
closed_later.close()
collect_stacks(Path(sys.argv[1]))
"""


def test_its_own_stacks_are_among_them_also_when_a_file_opened_before_was_closed(tmp_path: Path) -> None:
    """The list of its files then begins with one that is gone: that by which they were listed."""
    subprocess.run([sys.executable, "-c", OWN_STACKS, str(tmp_path)], check=True)
    [file] = tmp_path.iterdir()
    assert "in collect_stacks" in file.read_text()


HUNG = """
import subprocess, sys, time
import psutil
from verl.process.watchdog import Watchdog
theirs, ours = (subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL) for _ in range(2))
kill = psutil.Process.kill
def kill_ours(process):
    if process.pid == theirs.pid:
        raise psutil.AccessDenied(process.pid)
    kill(process)
psutil.Process.kill = kill_ours
print(theirs.pid, ours.pid, flush=True)
Watchdog(0.1, lambda seconds: None)
time.sleep(600)
"""


def test_a_hung_process_ends_though_a_descendant_is_another_users() -> None:
    """As what `sudo` has started is, which only root may end."""
    hung = subprocess.run([sys.executable, "-c", HUNG], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    theirs, ours = map(int, hung.stdout.split())
    os.kill(theirs, signal.SIGKILL)
    assert hung.returncode == 1
    assert not psutil.pid_exists(ours) or psutil.Process(ours).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "800000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_containers_quota_counts(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


V1 = "9:cpu:/\n4:memory:/docker/1f3\n0::/\n"
V2 = "0::/system.slice/job_7/step_0\n"


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        (V2, {}, 64),
        (V2, {"system.slice/job_7/step_0/memory.max": "max\n"}, 64),
        (V2, {"system.slice/job_7/step_0/memory.max": "max\n", "system.slice/job_7/memory.max": f"{8 * 2**30}\n"}, 8),
        ("0::/\n", {"memory.max": f"{16 * 2**30}\n"}, 16),
        ("0::/../../other\n", {"memory.max": f"{16 * 2**30}\n"}, 16),
        (V1, {"memory/memory.limit_in_bytes": f"{4 * 2**30}\n"}, 4),
        (V1, {"memory/docker/1f3/memory.limit_in_bytes": f"{4 * 2**30}\n"}, 4),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
        ("5:cpu,memory:/job\n", {"memory/job/memory.limit_in_bytes": f"{4 * 2**30}\n"}, 4),
        (None, {"memory.max": "1\n"}, 64),
    ],
)
def test_a_limit_of_a_container_or_a_job_counts(
    monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], gib: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * 2**30))
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert usable_memory(tmp_path / "groups", tmp_path / "own") == gib * 2**30


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (V2, {"system.slice/job_7/step_0/cpu.max": "max 100000\n", "system.slice/job_7/cpu.max": "400000 100000\n"}, 4),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "800000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8),
        ("4:cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "800000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
def test_a_jobs_quota_counts(own: str, files: dict[str, str], cores: int, tmp_path: Path) -> None:
    """Of the groups that the process is in, as a service or a job without a container is."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == cores


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {one})
    assert usable_cores(tmp_path) == 1


@pytest.mark.usefixtures("sixteen_cores")
def test_those_who_work_at_once_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "usable_cores", lambda: 16)
    assert [rank_threads(ranks) for ranks in (1, 2, 5, 32)] == [16, 8, 3, 1]
    assert [engine_threads(engines) for engines in (1, 2, 20)] == [15, 7, 1]


async def double(number: int) -> int:
    await asyncio.sleep(0)
    if number < 0:
        raise ValueError("negative")
    return 2 * number


def test_without_a_running_loop():
    assert run_to_end(double(4)) == 8
    with pytest.raises(ValueError, match="negative"):
        run_to_end(double(-1))


def test_inside_a_running_loop():
    async def cell() -> int:
        with pytest.raises(ValueError, match="negative"):
            run_to_end(double(-1))
        return run_to_end(double(5))

    assert asyncio.run(cell()) == 10
