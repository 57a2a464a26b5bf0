"""A clock that adds up idle time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class IdleClock:
    """Adds up the seconds between `start` and `stop`, each of which may be called twice."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._total_s = 0.0

    def start(self) -> None:
        self._since = self._since or time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._total_s += time.monotonic() - self._since
        self._since = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context in which the clock does not run, since something is done."""
        was_running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def read(self) -> float:
        """The idle seconds since the last call."""
        with self.stopped():
            total_s, self._total_s = self._total_s, 0.0
        return total_s
