"""A small environment for the rollout tests, found by dotted name as any other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

from verl.agent.environment import Environment, Outcome
from verl.errors import EnvironmentUnavailable
from verl.protocol import Prompt

MEETING_S = 120.0


class EchoEnvironment(Environment):
    """Answers each turn with `[number of characters]`. A turn of a prompt whose row says so finds it unavailable:
    `row["failures"]` times in all, then never again. `row["bug"]` raises an error that is nobody's infrastructure.
    With `row["folder"]` a turn leaves a file of its name there, after `row["waits_for"]` others have left theirs.
    """

    stop_strings = ("e",)

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        row = prompt.row
        if row.get("bug"):
            raise KeyError("a bug of the environment")
        if self._failures[row["name"]] < row.get("failures", 0):
            self._failures[row["name"]] += 1
            raise EnvironmentUnavailable(f"no answer for {row['name']}")
        if "folder" in row:
            await self._meet(Path(row["folder"]), row["name"], row.get("waits_for", 0))
        return Outcome("search", valid=True, done=False, reply=f"[{len(text)}]" if tools_allowed else "")

    async def _meet(self, folder: Path, name: str, others: int) -> None:
        deadline = time.monotonic() + MEETING_S
        while len(list(folder.iterdir())) < others:
            if time.monotonic() > deadline:
                raise KeyError(f"{name} waited in vain: only {sorted(p.name for p in folder.iterdir())} came")
            await asyncio.sleep(0.05)
        (folder / name).touch()
