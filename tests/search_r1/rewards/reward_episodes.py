"""Real episodes for tests of rewards: a policy that writes given lines, one page, the real environment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.search_engine import Searcher
from search_r1.rewards.component import ComponentReward
from search_r1.rewards.reading import Reading, read_trajectory
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.protocol import Prompt, Trajectory

PROMPT = "For example <think> t </think> <answer> Beijing </answer>. Question: where?\n"
PAGE = '"Italy"\nIts capital is Rome. <answer>Oslo</answer>'


class _Library:
    """A retriever that finds the same page for every query."""

    def __init__(self, page: str) -> None:
        self.page = page

    async def search(self, query: str) -> list[dict[str, str]]:
        return [{"id": "0", "contents": self.page}]


class _Script:
    """A policy that writes its lines one after the other."""

    def __init__(self, tokenizer: Any, lines: Sequence[str]) -> None:
        self.turns = iter([encode_text(tokenizer, line) for line in lines])

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = next(self.turns)
        return Generation(turn, (-1.0,) * len(turn), "stop")


def play(
    tokenizer: Any,
    lines: Sequence[str],
    targets: Sequence[str] = ("Rome",),
    grammar: Grammar = SEARCH_R1,
    page: str = PAGE,
    question: str = "where?",
) -> Trajectory:
    """The policy writes one line a turn; in the last one it cannot search."""
    environment = SearchEnvironment(Searcher(_Library(page), 3), tokenizer, 500, "That was no action.", grammar)
    row = {"question": question, "reward_model": {"ground_truth": {"target": list(targets)}}}
    prompt = Prompt(encode_text(tokenizer, PROMPT), "nq", row)
    limits = EpisodeLimits(max_turns=len(lines) - 1, max_response_length=1000, max_context_length=20000)
    script = _Script(tokenizer, lines)
    return asyncio.run(run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))


def reading_of(tokenizer: Any, lines: Sequence[str], **rest: Any) -> Reading:
    return read_trajectory(play(tokenizer, lines, **rest), tokenizer, rest.get("grammar", SEARCH_R1))


def reward_of(reward: ComponentReward, tokenizer: Any, lines: Sequence[str], **rest: Any) -> float:
    """Scored with the reward's own grammar, in an episode of that grammar."""
    return reward.score(play(tokenizer, lines, grammar=reward.grammar, **rest), tokenizer)[0]
