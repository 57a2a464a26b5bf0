"""A token bucket: how long a request has to wait so that an engine's rate is kept."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """`per_second` tokens a second, at most one second's worth (at least one token) saved up. It never sleeps."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second = per_second
        self._interval_s = 1.0 / per_second
        self._saved_s = max(1.0, self._interval_s) - self._interval_s
        self._clock = clock
        self._next = clock() - self._saved_s  # when the token after the last one taken is due

    def due_s(self, num_before: int = 0) -> float:
        """Seconds until a token is due for one before whom `num_before` others take theirs."""
        now = self._clock()
        return max(0.0, max(self._next, now - self._saved_s) + num_before * self._interval_s - now)

    def take(self) -> None:
        """Take the token that is due."""
        self._next = max(self._next, self._clock() - self._saved_s) + self._interval_s

    def pause(self, seconds: float) -> None:
        """No token is due for `seconds` from now: the engine asked for it."""
        self._next = max(self._next, self._clock() + seconds)
