"""A small environment for the rollout tests, found by dotted name as any other."""

from __future__ import annotations

from collections import Counter

from verl.agent.environment import Environment, Outcome
from verl.errors import EnvironmentUnavailable
from verl.protocol import Prompt


class EchoEnvironment(Environment):
    """Answers each turn with `[number of characters]`. A turn of a prompt whose row says so finds it unavailable:
    `row["failures"]` times in all, then never again. `row["bug"]` raises an error that is nobody's infrastructure.
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
        return Outcome("search", valid=True, done=False, reply=f"[{len(text)}]" if tools_allowed else "")
