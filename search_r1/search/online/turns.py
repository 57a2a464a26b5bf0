"""Whose turn it is to ask an engine: first come, first served, at its rate and so many at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from search_r1.search.online.rate_limit import RateLimit

_FIRST_GUESS_S = 0.5  # how long an answer takes, before one was seen
_WEIGHT = 0.2  # of the latest answer in the mean


class Turns:
    """Used from one event loop. One who is cancelled leaves the line and costs no token."""

    def __init__(self, rate: RateLimit, concurrency: int) -> None:
        self._rate = rate
        self._concurrency = concurrency
        self._line = asyncio.Lock()  # it lets the others in, in the order in which they came
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting = self._running = 0
        self._answer_s = _FIRST_GUESS_S

    def expected_s(self) -> float:
        """Seconds until the turn of one who comes now, as far as is known."""
        rounds_before = (self._waiting + self._running) // self._concurrency
        return max(self._rate.due_s(self._waiting), rounds_before * self._answer_s)

    def paused_s(self) -> float:
        """Seconds until the next turn of anyone, by the rate alone."""
        return self._rate.due_s()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
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
