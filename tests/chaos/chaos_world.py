"""Episodes of a scripted policy against a retrieval server, and what must never be in one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from fault_proxy import MARK

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.client import RetrievalClient
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import decode_turn, encode_text
from verl.protocol import Prompt, Trajectory

RIVERS = ("Ildra", "Sonne", "Tavik", "Morra")
PASSAGES = {name: f'"{name}"\nThe {name} is a river. It flows through the city of {name}burg.' for name in RIVERS}
LIMITS = EpisodeLimits(max_turns=3, max_response_length=128, max_context_length=900)
ERROR_TEXT = re.compile(rf"{MARK}|retriev|HTTP|error|127\.0\.0\.1|unavailable|Traceback", re.IGNORECASE)
"""What an error of the proxy, the client or the server has in it, and no passage or turn of these tests."""


class Script:
    """A policy that writes its lines one after the other."""

    def __init__(self, tokenizer: Any, lines: Sequence[str]) -> None:
        self.turns = iter([encode_text(tokenizer, line) for line in lines])

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = next(self.turns)[: sampling.max_tokens]
        return Generation(turn, tuple(-0.5 - 0.25 * (token % 3) for token in turn), "stop")


def lines_about(*queries: str, answer: str = "x") -> list[str]:
    """One search each, then the answer."""
    return [f"<search> {query} </search>" for query in queries] + [f"<answer> {answer} </answer>"]


def make_environment(
    url: str, tokenizer: Any, timeout_s: float = 30.0, deadline_s: float = 60.0, max_batch: int = 1
) -> SearchEnvironment:
    """Its times are those of a client that never gives up on a server that is only slow."""
    client = RetrievalClient(url, topk=1, timeout_s=timeout_s, deadline_s=deadline_s, max_batch=max_batch)
    return SearchEnvironment(Searcher(client, 1), tokenizer, 300, "That was no action.")


def make_prompt(tokenizer: Any, gold: str = "x") -> Prompt:
    row = {"question": "Where?", "reward_model": {"ground_truth": {"target": [gold]}}}
    return Prompt(tuple(encode_text(tokenizer, "Where does the river flow?\n")), "test", row)


def play(environment: SearchEnvironment, tokenizer: Any, scripts: Sequence[Sequence[str]]) -> list[Trajectory]:
    """All scripts at the same time, each an episode of its own."""
    return asyncio.run(playing(environment, tokenizer, scripts))


async def playing(environment: SearchEnvironment, tokenizer: Any, scripts: Sequence[Sequence[str]]) -> list[Trajectory]:
    runs = (
        run_episode(
            *(make_prompt(tokenizer), str(number), Script(tokenizer, lines)),
            *(environment, tokenizer, Sampling(), LIMITS, number),
        )
        for number, lines in enumerate(scripts)
    )
    try:
        return await asyncio.gather(*runs)
    finally:
        await environment.close()


def assert_no_error_text(trajectory: Trajectory, tokenizer: Any) -> None:
    """In no segment, and in no event: `failure` alone says what went wrong."""
    text = decode_turn(tokenizer, tuple(trajectory.ids))
    for where in (text, *(str(event) for event in trajectory.events)):
        assert not ERROR_TEXT.search(where), where
