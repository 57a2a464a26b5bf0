"""A test that exceeds its time limit fails, and says what each of its processes was doing (a pytest plugin).

pytest-timeout keeps the time. The limit is the test's own `@pytest.mark.timeout`, or that of its folder, or `timeout`
in pyproject.toml.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

PY_SPY = Path(sys.executable).with_name("py-spy")
STACK_S = 10.0  # for the stacks of one process
GRACE_S = 120  # for the clean-up of a test that was stopped; a process that needs longer is ended
HUNG = "hung"  # the name under which a report carries where its test stood
FOLDERS = {"e2e": 900, "chaos": 900}  # whole runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        limit = FOLDERS.get(item.path.parent.name)
        if limit is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit))


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    def expire(_: int, frame: FrameType | None) -> None:
        __tracebackhide__ = True
        stood = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "in native code"
        item.user_properties.append((HUNG, f"{settings.timeout:.0f} s, {stood}"))
        pytest.fail(f"not done after its time limit of {settings.timeout:.0f} s\n{stacks()}")

    signal.signal(signal.SIGALRM, expire)
    _begin(settings.timeout)
    return True


def _begin(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # A main thread in native code hears no signal. pytest-xdist then reports a crashed worker and starts another.
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=sys.__stderr__)


@pytest.hookimpl
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    _end()
    return True


def _end() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """What is done in here, such as waiting for another test session, is not part of the running test's time."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left:
        _end()
    try:
        yield
    finally:
        if left:
            _begin(left)


def stacks() -> str:
    """The Python stacks of this process and of all that it has started, as far as they can be read."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = [f"this process\n{file.read()}"]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}\n{_stack_of(process)}")
    return "\n".join(found)


def _stack_of(process: psutil.Process) -> str:
    """What py-spy says, or (it is no Python, or this user may not look) the system call that the process is in."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        dump = [str(PY_SPY), "dump", "--nonblocking", "--pid", str(process.pid)]
        done = subprocess.run(dump, capture_output=True, text=True, timeout=STACK_S, check=False)
        if done.returncode == 0:
            return done.stdout
    with contextlib.suppress(OSError):
        return f"{process.status()} in {Path(f'/proc/{process.pid}/wchan').read_text()}\n"
    return f"{process.status()}\n"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for key in ("failed", "error") for report in terminalreporter.stats.get(key, ())]
    ran = [report for report in reports if isinstance(report, pytest.TestReport)]  # others are of files
    hung = {report.nodeid: where for report in ran for name, where in report.user_properties if name == HUNG}
    if hung:
        terminalreporter.section("hung")
        for test, where in hung.items():
            terminalreporter.line(f"{test}: {where}")
