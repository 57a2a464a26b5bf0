"""What happens to a run that hangs: its driver is ended, and every process leaves the Python stacks of its threads.

Waits for workers have their own deadlines; the watchdog is for everything else. A process that called `offer_stacks`
writes its stacks when it gets `SIGNAL`, also while it holds the interpreter's lock or sits in a native call. They go to
a file in memory, which `collect_stacks` finds and reads through /proc (Linux only).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

POLL_S = 1.0
_latest = time.monotonic()


class Watchdog:
    """Calls `tell(seconds)` and ends this process and its descendants after `timeout_s` without progress."""

    def __init__(self, timeout_s: float, tell: Callable[[float], None]) -> None:
        self._timeout_s, self._tell = timeout_s, tell
        self._stopped = threading.Event()
        note_progress()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(POLL_S, self._timeout_s / 4)):
            if seconds_without_progress() > self._timeout_s:
                try:
                    self._tell(seconds_without_progress())
                finally:
                    _end()


def _end() -> None:
    """End this process and its descendants at once: a stuck call cannot be raised out of, and may not be waited for."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's, as what sudo has started
            process.kill()
    os._exit(1)


# The time when the driver last got something done, which a watchdog looks at.


def note_progress() -> None:
    global _latest
    _latest = time.monotonic()


def seconds_without_progress() -> float:
    return time.monotonic() - _latest


SIGNAL = signal.SIGUSR2
ANSWER_S = 5.0  # how long an answer is waited for
_NAME = "verl-stacks"


def offer_stacks() -> None:
    """Answer `collect_stacks` from now on. A second call changes nothing."""
    if hasattr(os, "memfd_create"):
        faulthandler.register(SIGNAL, _own_memory(os.getpid()), all_threads=True)


@functools.cache
def _own_memory(pid: int) -> int:
    return os.memfd_create(f"{_NAME}-{pid}")


def collect_stacks(folder: Path) -> list[Path]:
    """Signal this process and all its descendants that offer stacks; one text file each, {title}-{pid}.txt in `folder`.

    Those that do not answer within `ANSWER_S` seconds (they are stopped) are left out.
    """
    # All are signalled before any answer is waited for, so that a large run takes no longer than a small one.
    signalled = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            if (memory := _memory_of(process.pid)) is not None:
                signalled[process] = (memory, memory.stat().st_size)
                process.send_signal(SIGNAL)

    # A process writes its stacks behind what it wrote earlier; they are complete once the file grows no more.
    deadline = time.monotonic() + ANSWER_S
    found = []
    folder.mkdir(parents=True, exist_ok=True)
    for process, (memory, size) in signalled.items():
        with contextlib.suppress(psutil.Error, OSError):
            before = size
            while (now := memory.stat().st_size) > before or (now == size and time.monotonic() < deadline):
                before = now
                time.sleep(0.2)
            if text := memory.read_bytes()[size:]:
                command = (process.cmdline() or [process.name()])[0]
                title = "_".join(re.findall(r"\w+", command)[-3:])
                path = folder / f"{title}-{process.pid}.txt"
                path.write_bytes(text)
                found.append(path)
    return found


def _memory_of(pid: int) -> Path | None:
    """The file that a process offers its stacks in; None if it offers none."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # Others may be closed meanwhile; of this process itself, the one by which they were listed always is.
        with contextlib.suppress(FileNotFoundError):
            if f"{_NAME}-{pid} " in os.readlink(descriptor) + " ":
                return descriptor
    return None
