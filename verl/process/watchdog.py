"""Ends a run whose driver hangs. Waits for workers have their own deadlines; this is for everything else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

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
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(1)


# The time when the driver last got something done, which a watchdog looks at.


def note_progress() -> None:
    global _latest
    _latest = time.monotonic()


def seconds_without_progress() -> float:
    return time.monotonic() - _latest
