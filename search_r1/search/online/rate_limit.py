"""The rate limit of an online engine: a token bucket, and the queue of the requests that wait for a token.

Why not aiolimiter: a query whose turn would come after its client's timeout is refused at once, with the time of its
turn, and the engine's Retry-After delays all turns. A limiter that can only be awaited supports neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_FIRST_GUESS_S = 0.5  # how long a reply takes, before one was seen
_WEIGHT = 0.2  # of the latest reply in the mean


class RateLimit:
    """`per_second` tokens per second; at most one second's worth (at least one token) accumulates. It never sleeps."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_second = per_second
        self._interval_s = 1.0 / per_second
        self._saved_s = max(1.0, self._interval_s) - self._interval_s
        self._clock = clock
        self._next = clock() - self._saved_s  # when the token after the last one taken is due

    def due_s(self, num_before: int = 0) -> float:
        """Seconds until a token is due for a request with `num_before` others ahead of it."""
        now = self._clock()
        return max(0.0, max(self._next, now - self._saved_s) + num_before * self._interval_s - now)

    def take(self) -> None:
        """Consume the token that is due."""
        self._next = max(self._next, self._clock() - self._saved_s) + self._interval_s

    def pause(self, seconds: float) -> None:
        """Make no token due for `seconds` from now, as the engine's Retry-After demands."""
        self._next = max(self._next, self._clock() + seconds)


class RequestQueue:
    """First come, first served, at the engine's rate and concurrency. Used from one event loop.

    A cancelled request leaves the queue and costs no token.
    """

    def __init__(self, rate: RateLimit, concurrency: int) -> None:
        self._rate = rate
        self._concurrency = concurrency
        self._line = asyncio.Lock()  # keeps the order of arrival
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting = self._running = 0
        self._answer_s = _FIRST_GUESS_S

    def expected_s(self) -> float:
        """Estimated seconds until a request that arrives now would be sent."""
        rounds_before = (self._waiting + self._running) // self._concurrency
        return max(self._rate.due_s(self._waiting), rounds_before * self._answer_s)

    def paused_s(self) -> float:
        """Seconds until the next request may be sent, as far as the rate limit is concerned."""
        return self._rate.due_s()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it."""
        self._waiting += 1
        try:
            await self._wait()
        finally:
            self._waiting -= 1
        self._running += 1
        start = time.monotonic()
        try:
            yield
            self._answer_s += _WEIGHT * (time.monotonic() - start - self._answer_s)
        finally:
            self._running -= 1
            self._slots.release()

    async def _wait(self) -> None:
        async with self._line:
            await self._slots.acquire()
            try:
                while (wait_s := self._rate.due_s()) > 0:  # a pause may have come meanwhile
                    await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self._slots.release()
                raise
            self._rate.take()
