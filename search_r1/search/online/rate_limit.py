"""A token bucket: how long a request has to wait so that an engine's rate is kept."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """`per_second` tokens a second, at most one second's worth (at least one token) saved up.

    `reserve` never sleeps: the caller does, in its own way. Those who reserve are served in the order they came.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 1.0 / per_second
        self._saved_s = max(1.0, self._interval_s) - self._interval_s
        self._clock = clock
        self._next = clock() - self._saved_s  # when the token after the last one taken is due

    def reserve(self, longest_s: float) -> float | None:
        """Take a token; seconds until it is due. None, and no token is taken, when that is more than `longest_s`."""
        now = self._clock()
        due = max(self._next, now - self._saved_s)
        wait_s = max(0.0, due - now)
        if wait_s > longest_s:
            return None
        self._next = due + self._interval_s
        return wait_s

    def pause(self, seconds: float) -> None:
        """No token is due for `seconds` from now: the engine asked for it."""
        self._next = max(self._next, self._clock() + seconds)
