"""A training run that is watched through its log."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class WatchedRun:
    """A subclass starts `process`, which appends to `log`."""

    process: Any

    def __init__(self, log: Path) -> None:
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0

    @property
    def said(self) -> str:
        """All that this process has written to its log, which earlier ones may have begun."""
        return self.log.read_bytes()[self._begin :].decode()

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 900) -> None:
        """Fails when the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.said[-6000:]}"
            assert time.monotonic() < deadline, f"waited for {timeout_s} s\n{self.said[-6000:]}"
            time.sleep(0.002)
