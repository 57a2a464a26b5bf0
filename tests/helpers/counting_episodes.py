"""Episodes with state that count their turns, and a policy that says its lines to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agent.environment import INTERRUPTED, Environment, Episode, EpisodicEnvironment, Generation, Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.pause import OpenAnswers, Pause
from verl.agent.text import decode_turn, encode_text
from verl.protocol import Prompt, Trajectory

LIMITS = EpisodeLimits(max_turns=4, max_response_length=40, max_context_length=300, step_timeout_s=60)
Reaction = Callable[["Count"], Awaitable[Any]]


@dataclass(eq=False)
class Count(Episode):
    """Counts its turns; `react` may answer instead."""

    world: Counting
    turns: int = 0
    closed: int = 0

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        assert not self.closed
        self.turns += 1
        if text.startswith("wait"):
            self.world.asked += 1
            await self.world.may_answer.wait()
        if self.world.react is not None:
            return await self.world.react(self)
        return Outcome("count", valid=True, done="say" in text, reply="" if "say" in text else f"[{self.turns}]")

    async def close(self) -> None:
        self.closed += 1
        if self.world.close is not None:
            await self.world.close()


@dataclass
class Counting(EpisodicEnvironment):
    react: Reaction | None = None
    close: Callable[[], Awaitable[None]] | None = None  # type: ignore[assignment]
    opened: list[Count] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0
    stop_strings: tuple[str, ...] = ("!",)

    async def open(self, prompt: Prompt) -> Episode:
        self.opened.append(Count(self))
        return self.opened[-1]

    def all_closed(self) -> bool:
        return bool(self.opened) and all(one.closed == 1 for one in self.opened)


@dataclass
class Lines:
    """A policy that says the line of a turn's number; at a line that ends in "~" it is interrupted."""

    tokenizer: Any
    lines: Sequence[str]
    pause: Pause | None = None
    contexts: list[list[int]] = field(default_factory=list)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        self.contexts.append(list(ids))
        line = self.lines[min(len(self.contexts), len(self.lines)) - 1]
        cut = line.endswith("~") and self.pause is not None
        if cut:
            self.pause.begin()
        said = encode_text(self.tokenizer, line.rstrip("~"))
        return Generation(said, (-0.5,) * len(said), INTERRUPTED if cut else "stop")


class Scene:
    """Episodes of one process."""

    def __init__(self, tokenizer: Any, world: Environment | None = None, limits: EpisodeLimits = LIMITS) -> None:
        self.tokenizer, self.world, self.limits = tokenizer, world or Counting(), limits
        self.answers = OpenAnswers()
        self.prompt = Prompt(encode_text(tokenizer, "question: "), "test", {})

    async def play(
        self, *lines: str, begun: Trajectory | None = None, pause: Pause | None = None, group: str = "g"
    ) -> Trajectory:
        pause = pause or Pause(self.answers)
        self.policy = Lines(self.tokenizer, lines, pause)
        among = (self.policy, self.world, self.tokenizer, Sampling(), self.limits, 7, begun, pause)
        return await run_episode(self.prompt, group, *among)

    def text(self, trajectory: Trajectory) -> str:
        return decode_turn(self.tokenizer, trajectory.ids)


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def reacting(react: Callable[[Count], Any]) -> Counting:
    async def answer(episode: Count) -> Any:
        return react(episode)

    return Counting(answer)


def done_at(episode: Count, turn: int) -> Outcome:
    return Outcome("count", True, episode.turns == turn, "" if episode.turns == turn else f"[{episode.turns}]")
