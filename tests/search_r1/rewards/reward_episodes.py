"""Real episodes for tests of rewards: a policy that writes given lines, one page, the real environment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from scripted_policy import Script

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.search_engine import Searcher
from search_r1.rewards.component import ComponentReward
from search_r1.rewards.reading import Reading, read_trajectory
from verl.agent.environment import Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.protocol import Prompt, Segment, Source, Status, Trajectory

PROMPT = (
    "Think between <think> and </think>, ask by <search> query </search>, read <information> and </information>, "
    "answer between <answer> and </answer>, for example <answer> Beijing </answer>. Question: where?\n"
)
FEEDBACK = "\nNo action: write <search> query </search> or <answer> answer </answer>.\n"
PAGE = '"Italy"\nIts capital is Rome. <answer>Oslo</answer>'


class _Library:
    """A retriever that finds the same page for every query."""

    def __init__(self, page: str) -> None:
        self.page = page

    async def search(self, query: str) -> list[dict[str, str]]:
        return [{"id": "0", "contents": self.page}]


def play(
    tokenizer: Any,
    lines: Sequence[str],
    targets: Sequence[str] = ("Rome",),
    grammar: Grammar = SEARCH_R1,
    page: str = PAGE,
    question: str = "where?",
    with_search: bool = True,
) -> Trajectory:
    """The policy writes one line a turn; in the last one it cannot search."""
    searcher = Searcher(_Library(page), 3) if with_search else None
    environment = SearchEnvironment(searcher, tokenizer, 500, "That was no action.", grammar)
    row = {"question": question, "reward_model": {"ground_truth": {"target": list(targets)}}}
    prompt = Prompt(encode_text(tokenizer, PROMPT), "nq", row)
    limits = EpisodeLimits(max_turns=len(lines) - 1, max_response_length=1000, max_context_length=20000)
    script = Script([encode_text(tokenizer, line) for line in lines])
    return asyncio.run(run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))


def reading_of(tokenizer: Any, lines: Sequence[str], **rest: Any) -> Reading:
    return read_trajectory(play(tokenizer, lines, **rest), tokenizer, rest.get("grammar", SEARCH_R1))


def reward_of(reward: ComponentReward, tokenizer: Any, lines: Sequence[str], **rest: Any) -> float:
    """Scored with the reward's own grammar, in an episode of that grammar."""
    return reward.score(play(tokenizer, lines, grammar=reward.grammar, **rest), tokenizer)[0]


def written(tokenizer: Any, target: Any, *turns: tuple[str, str | None], question: str = "where?") -> Trajectory:
    """Each turn is what the policy wrote and the reply: passages, feedback, or None. The gold answer is `target`."""
    row = {"question": question, "reward_model": {"style": "rule", "ground_truth": {"target": target}}}
    ids = encode_text(tokenizer, PROMPT)
    trajectory = Trajectory("g", Prompt(ids, "nq", row), [Segment(Source.PROMPT, ids)], Status.ANSWERED)
    for number, (text, reply) in enumerate(turns):
        ids = encode_text(tokenizer, text)
        trajectory.segments.append(Segment(Source.POLICY, ids, (0.0,) * len(ids)))
        event: dict[str, Any] = {"turn": number, "text": text, "valid": reply != FEEDBACK}
        if reply is not None:
            trajectory.segments.append(Segment(Source.ENVIRONMENT, encode_text(tokenizer, reply)))
            acted = {"action": "search", "query": "q", "executed": True}
            event |= {"action": "invalid"} if reply == FEEDBACK else acted
        trajectory.events.append(event)
    return trajectory
