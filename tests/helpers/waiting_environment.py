"""An environment whose searches take as long as a test wants."""

from __future__ import annotations

import asyncio

from verl.agent.environment import Environment


class WaitingEnvironment(Environment):
    """Counts the searches that were asked, and those that were cancelled before it `may_answer`."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = self.cancelled = 0

    async def search(self) -> None:
        self.asked += 1
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
