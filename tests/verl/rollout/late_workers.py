"""Actors in the place of rollout workers, in a module that their processes import in no time: it needs no vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.protocol import Segment, Source, Status, Trajectory


class LateWorker:
    """Its `play` begins `late` seconds after it was called, and then holds its episodes until they are abandoned."""

    def __init__(self) -> None:
        self.late, self.calls = 1.5, 0
        self.playing, self.is_called = asyncio.Event(), asyncio.Event()

    async def delay(self, late: float) -> None:
        self.late = late

    async def play(self, new: list[Any]) -> list[Any]:
        self.is_called.set()
        await asyncio.sleep(self.late)
        self.calls += 1
        self.playing.set()
        while self.playing.is_set():
            await asyncio.sleep(0.01)
        return []

    async def called(self) -> None:
        await self.is_called.wait()

    async def abandon(self) -> None:
        self.playing.clear()

    async def state(self) -> tuple[int, bool]:
        return self.calls, self.playing.is_set()


class OneShort:
    """Ends the episodes of the first prompt at once, and the others when they are interrupted."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.interrupted = asyncio.Event()

    async def play(self, new: list[Any]) -> list[Any]:
        if new and not self.held:
            self.interrupted.clear()
        self.held += new
        short = [request for request in self.held if request.prompt.ids == (1,)]
        self.held = [request for request in self.held if request not in short]
        if not short:
            await self.interrupted.wait()
        return [(request.slot, ended(request, Status.ANSWERED)) for request in short]

    async def interrupt(self) -> list[Any]:
        held, self.held = self.held, []
        self.interrupted.set()
        return [(request.slot, ended(request, None)) for request in held]


def ended(request: Any, status: Status | None) -> Trajectory:
    return Trajectory(request.group_id, request.prompt, [Segment(Source.PROMPT, request.prompt.ids)], status)
