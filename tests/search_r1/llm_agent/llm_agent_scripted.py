"""A search agent whose policy says lines that are given, over a shelf of passages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from llm_agent_world import PASSAGES

from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.llm_agent.templates import load_template
from verl.agent.environment import Generation, Sampling, join_pieces
from verl.agent.episode import EpisodeLimits
from verl.agent.text import encode_text
from verl.errors import RolloutError

# What stands in a context once for each turn that was spoken before: a reply, or the request for a summary, or both.
_SPOKEN = ("</information>\n\n", "The turn was", "There is little room", "</summary>\n\n<information>")


@dataclass
class Script:
    """A policy that says its lines, the one after as many turns as were answered; token by token."""

    tokenizer: Any
    lines: Sequence[str]
    stalls: bool = False
    num_running: int = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        return join_pieces([piece async for piece in self.stream(ids, sampling)])

    async def stream(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Generation, None]:
        self.num_running += 1
        try:
            if self.stalls:
                await asyncio.sleep(60)
            spoken = sum(self.tokenizer.decode(ids).count(sign) for sign in _SPOKEN)
            line = encode_text(self.tokenizer, self.lines[spoken])
            cut = line[: sampling.max_tokens]
            for place, token in enumerate(cut, start=1):
                reason = "" if place < len(cut) else "stop" if len(cut) == len(line) else "length"
                yield Generation((token,), (-0.5,), reason)
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1

    async def check(self) -> None:
        if self.stalls:
            raise RolloutError("the engine has died")


class Shelf:
    def search(self, query: str) -> list[dict[str, str]]:
        return [{"id": query, "contents": PASSAGES[query]}]


def agent_of(tokenizer: Any, lines: Sequence[str], context: int = 800, stalls: bool = False) -> SearchAgent:
    environment = SearchEnvironment(Searcher(Shelf(), 1), tokenizer, 300, "The turn was neither.")
    limits = EpisodeLimits(max_turns=2, max_response_length=60, max_context_length=context)
    script = Script(tokenizer, lines, stalls)
    return SearchAgent(script, environment, tokenizer, load_template("tinywiki"), limits, Sampling(0.0))
