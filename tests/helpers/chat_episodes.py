"""Episodes of a chat model that searches by tool calls and says its turns by heart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from format_models import model_format, tokenizer_of
from scripted_policy import Script

from search_r1.llm_agent.search_engine import Searcher
from search_r1.tools.search import SearchTool
from verl.agent.chat import ChatEnvironment
from verl.agent.environment import Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.text import encode_text
from verl.agent.tools.loading import ToolSet
from verl.protocol import Prompt, Trajectory

QUESTION = "Through which country does the Ildra flow?"
PASSAGES = {
    "river": '"Ildra"\nThe Ildra is a river. It flows through the city of Vonmark.',
    "city": '"Vonmark"\nVonmark is a city of the country Sael.',
}


class Shelf:
    def search(self, query: str) -> list[dict[str, str]]:
        return [{"id": query, "contents": PASSAGES[query]}]


def search(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "arguments": arguments}}


def says(content: str, *calls: Mapping[str, Any], thought: str = "") -> dict[str, Any]:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return message | ({"reasoning_content": thought} if thought else {})


def chat_environment(name: str, thinking: str = "template") -> ChatEnvironment:
    """The environment of the tokenizer `name` of `format_models`, with the tool search over `PASSAGES`."""
    tools = ToolSet([SearchTool(Searcher(Shelf(), 1), tokenizer_of(name), 300)])
    return ChatEnvironment(model_format(name, thinking), tools, tokenizer_of(name))


def turn_ids(name: str, turns: Sequence[Any], thinking: str = "template") -> list[Sequence[int]]:
    """The ids of turns: messages as the format writes them, or texts."""
    form = model_format(name, thinking)
    return [form.turn(turn) if isinstance(turn, dict) else encode_text(tokenizer_of(name), turn) for turn in turns]


def chat_trajectory(name: str, turns: Sequence[Any], thinking: str = "template", max_turns: int = 6) -> Trajectory:
    """A whole episode of `QUESTION`, whose answer is Sael."""
    environment, asked = chat_environment(name, thinking), [{"role": "user", "content": QUESTION}]
    row = {"question": QUESTION, "reward_model": {"ground_truth": {"target": ["Sael"]}}}
    prompt = Prompt(environment.prompt_ids(asked), "rivers", row, messages=asked)
    script, limits = Script(turn_ids(name, turns, thinking)), EpisodeLimits(max_turns, 400, 6000)
    tokenizer = tokenizer_of(name)
    return asyncio.run(run_episode(prompt, "g", script, environment, tokenizer, Sampling(), limits, None))
