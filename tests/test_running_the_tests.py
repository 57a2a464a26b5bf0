"""How the tests are run: time limits, the order of files, what is left out. Each in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import LONGEST_FIRST, pytest_xdist_auto_num_workers

ROOT = Path(__file__).resolve().parents[1]
HANGS = '''\
import subprocess, sys, threading

lock = threading.Lock()
lock.acquire()

CHILD = """
import time
def child_sleeps(): time.sleep(600)
child_sleeps()
"""

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    try:
        lock.acquire()
    finally:
        child.kill()

def test_goes_on(): pass
'''


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/helpers"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    names = ("xdist", "pytest_timeout", "time_limits", "tiers", "no:cacheprovider")
    plugins = [word for name in names for word in ("-p", name)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With slow and other tests in three files."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name in "abc":
        text = f"import pytest\n@pytest.mark.slow\ndef test_{name}(): pass\ndef test_quick(): pass\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["one process", "xdist"])
def test_a_test_that_hangs_fails_with_the_stacks_of_all_its_processes(tmp_path: Path, processes: tuple[str]) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    done = pytest_in(tmp_path, "--timeout", "2", *processes)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "not done after its time limit of 2 s" in done.stdout
    assert "in test_hangs" in done.stdout and "child_sleeps" in done.stdout
    summary = done.stdout.split(" hung ")[1]
    line = HANGS.splitlines().index("        lock.acquire()") + 1
    assert f"test_hangs.py::test_hangs: 2 s, {tmp_path}/test_hangs.py:{line}" in summary


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_what_did_not_run_is_one_line_at_the_end(folder: Path, processes: tuple[str]) -> None:
    (folder / "test_d.py").write_text("import pytest\ndef test_page(): pytest.skip('no browser: get one')\n")
    done = pytest_in(folder, "-m", "not slow", *processes)
    assert done.returncode == 0
    assert "did not run: 3 slow tests (bash scripts/test.sh --all); 1: no browser: get one" in done.stdout


def test_all_files_with_hosts_are_in_one_process(folder: Path) -> None:
    """Which would otherwise wait for each other: the first files go to one process each."""
    for name in "ab":
        (folder / f"test_{name}.py").write_text(f"import pytest\nfrom hosts import Host\ndef test_{name}(): pass\n")
    lines = pytest_in(folder, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-v").stdout.splitlines()
    ran = {line.split()[-1].split("::")[1]: line.split()[0] for line in lines if "PASSED" in line}
    assert ran.keys() == {"test_a", "test_b", "test_c", "test_quick"}, lines
    assert ran["test_a"] == ran["test_b"] != ran["test_c"], lines


@pytest.mark.parametrize(
    ("cores", "gib", "processes"), [(1, 7.8, 2), (2, 23.5, 2), (4, 31.2, 3), (8, 64, 8), (64, 62, 7), (64, 512, 8)]
)
def test_a_larger_machine_runs_more_files_at_once(
    monkeypatch: pytest.MonkeyPatch, cores: int, gib: float, processes: int
) -> None:
    monkeypatch.setattr("tiers.usable_cores", lambda: cores)
    monkeypatch.setattr("tiers.usable_memory", lambda: int(gib * 2**30))
    assert pytest_xdist_auto_num_workers() == processes


def test_each_day_begins_with_another_third_of_the_files(folder: Path) -> None:
    def order(day: int) -> str:
        lines = pytest_in(folder, "-m", "slow", "--day", str(day), "-v").stdout.splitlines()
        return "".join(line[5] for line in lines if line.endswith("%]") and line.startswith("test_"))

    assert [order(day) for day in (0, 1, 2, 3)] == ["abc", "bca", "cab", "abc"]


def test_what_the_time_did_not_suffice_for_is_named(folder: Path) -> None:
    done = pytest_in(folder, "-m", "slow", "--until", str(time.time() - 1))
    assert done.returncode == 0 and "3 skipped" in done.stdout
    assert all(f"test_{name}.py::test_{name}" in done.stdout.split("not reached")[1] for name in "abc")


def test_the_files_that_begin_early_are_there() -> None:
    assert all((ROOT / file).is_file() for file in LONGEST_FIRST)
    assert len(set(LONGEST_FIRST)) == len(LONGEST_FIRST)
