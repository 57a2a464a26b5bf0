"""What tools of chat models cost: waiting for them, and the processor time of a turn beside one with tags.

    .venv/bin/python scripts/bench/chat_throughput.py [--episodes 512] [--turns 4] [--tool_ms 200] [--sampler_ms 0]

Episodes are those of a run, with real tokenizer, chat template, tools and environments; the policy says turns by heart,
after `--sampler_ms`, so no model is needed. The sides of a figure take turns in every round, and medians are printed.

    waiting     every turn calls four tools at once: two coroutines and two plain functions, each of which waits
                `--tool_ms`. Beside it the same episodes with tools that return at once. Waiting should cost no more
                than itself: the bar is the second side's wall clock / 0.9 + `--tool_ms` for every turn with calls
    processor   every turn searches once, for passages that are there at once. A side with agent.format=chat, and one
                with tags; their turns and what they read have as many tokens. The bar is 1.3 times the processor time
                of this process for a turn with tags

The second figure is of `SEARCHING` episodes. `--tokenizer` is a folder with a tokenizer and its chat template (Hermes
calls); without it, one is trained on the documentation. The last line is JSON; `_ok` says whether a bar is met.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from search_r1.data.tinywiki.build import train_chat_tokenizer
from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.search_engine import Searcher
from search_r1.tools.search import SearchTool
from verl.agent.chat import ChatEnvironment
from verl.agent.environment import Environment, Generation, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.formats import format_of
from verl.agent.messages import encode_messages
from verl.agent.text import encode_text
from verl.agent.tools import tool_from_function
from verl.agent.tools.loading import ToolSet
from verl.protocol import Prompt, Status, Trajectory

ROOT = Path(__file__).resolve().parents[2]
SHARE, PROCESSOR_BAR = 0.9, 1.3
SEARCHING = 64  # episodes of which the processor time is measured
THOUGHT, QUERY, PASSAGE, NUM_PASSAGES = 60, 8, 100, 3  # words of a turn's thought, its query, and what is found
SAMPLING, LIMITS = Sampling(), EpisodeLimits(max_turns=64, max_response_length=4096, max_context_length=1 << 20)
ASKED = [{"role": "user", "content": "Through which country does the Ildra flow?"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=512, help="at once, that wait for tools")
    parser.add_argument("--turns", type=int, default=4, help="with calls, of an episode; one with the answer follows")
    parser.add_argument("--tool_ms", type=float, default=200.0)
    parser.add_argument("--sampler_ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one that does not")
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    given = options.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(given) if given else train_chat_tokenizer(texts, 8000)
    bench = Bench(tokenizer, [word for text in texts for word in text.split()], options)
    print(json.dumps(bench.waiting() | bench.processor()))


@dataclass(frozen=True)
class Side:
    """An environment, the prompt of its episodes, and the turns of each episode."""

    environment: Environment
    prompt: Prompt
    turns: Sequence[Sequence[tuple[int, ...]]]


@dataclass
class Policy:
    """Says the turns of one episode, each after a time."""

    turns: Sequence[tuple[int, ...]]
    latency_s: float
    num_said: int = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        turn = self.turns[self.num_said]
        self.num_said += 1
        return Generation(turn, (-1.0,) * len(turn), "stop")


class Shelf:
    """A search engine that has an answer at once: other passages for every query."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    async def search(self, query: str) -> list[Mapping[str, Any]]:
        rng = random.Random(query)
        return [{"id": str(rng.random()), "contents": f"A title\n{self._text(rng)}"} for _ in range(NUM_PASSAGES)]

    def _text(self, rng: random.Random) -> str:
        start = rng.randrange(len(self._words) - PASSAGE)
        return " ".join(self._words[start : start + PASSAGE])


class Bench:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, words: Sequence[str], options: argparse.Namespace) -> None:
        self.tokenizer, self.words, self.options = tokenizer, words, options
        self.rng = random.Random(0)
        self.format = format_of(tokenizer)

    def waiting(self) -> dict[str, Any]:
        """The wall clock of episodes that wait for their tools, and of the same with tools that return at once."""
        options = self.options
        waits = self._tools_side(options.tool_ms / 1000)
        at_once = self._tools_side(0.0)
        seconds = self._in_turn({"waits": waits, "at_once": at_once}, time.perf_counter)
        bar = seconds["at_once"] / SHARE + options.turns * options.tool_ms / 1000
        calls = f"{options.episodes} episodes, {options.turns} turns with 4 calls each"
        print(f"waiting    {calls}: {seconds['waits']:.2f} s with tools of {options.tool_ms:g} ms")
        print(f"           {seconds['at_once']:.2f} s with tools that return at once: the bar is {bar:.2f} s")
        found = {f"{name}_s": round(value, 3) for name, value in seconds.items()}
        return found | {"waiting_bar_s": round(bar, 3), "waiting_ok": seconds["waits"] <= bar}

    def processor(self) -> dict[str, Any]:
        """The processor time of a turn in both formats."""
        chat, tags = self._search_sides()
        lengths = {name: self._lengths(side) for name, side in (("chat", chat), ("tags", tags))}
        seconds = self._in_turn({"chat": chat, "tags": tags}, time.process_time)
        turns = SEARCHING * (self.options.turns + 1)
        us = {name: 1e6 * value / turns for name, value in seconds.items()}
        ratio = us["chat"] / us["tags"]
        for name in us:
            print(f"processor  {name}: {us[name]:.0f} us a turn; {lengths[name]}")
        print(f"           chat / tags = {ratio:.2f}: the bar is {PROCESSOR_BAR}")
        found = {f"{name}_us": round(value, 1) for name, value in us.items()}
        return found | {"processor_ratio": round(ratio, 3), "processor_ok": ratio <= PROCESSOR_BAR}

    def _in_turn(self, sides: Mapping[str, Side], clock: Callable[[], float]) -> dict[str, float]:
        """The median of what each side takes."""
        seen: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(self.options.rounds + 1):
            for name, side in sides.items():
                begun = clock()
                asyncio.run(self._play(side))
                if number:
                    seen[name].append(clock() - begun)
        return {name: statistics.median(found) for name, found in seen.items()}

    async def _play(self, side: Side) -> list[Trajectory]:
        latency_s = self.options.sampler_ms / 1000
        played = await asyncio.gather(
            *(
                run_episode(
                    side.prompt,
                    f"group-{number}",
                    Policy(turns, latency_s),
                    side.environment,
                    self.tokenizer,
                    SAMPLING,
                    LIMITS,
                    number,
                )
                for number, turns in enumerate(side.turns)
            )
        )
        for trajectory in played:
            assert trajectory.status is Status.ANSWERED and trajectory.num_turns == self.options.turns + 1
        return played

    def _tools_side(self, seconds: float) -> Side:
        """Turns with four calls."""
        tools = _tools(seconds)
        environment = ChatEnvironment(self.format, ToolSet([tool_from_function(one) for one in tools]), self.tokenizer)
        calls = [self._call(one.__name__, place=place) for place, one in enumerate(tools)]
        turn = self.format.turn({"role": "assistant", "content": "Let me see.", "tool_calls": calls})
        turns = [turn] * self.options.turns + [self.format.turn({"role": "assistant", "content": "Done."})]
        return Side(environment, self._prompt(environment), [turns] * self.options.episodes)

    def _search_sides(self) -> tuple[Side, Side]:
        """The same searches in both formats. A thought in tags is longer by as many tokens as a call is beside tags."""
        searcher = Searcher(Shelf(self.words), NUM_PASSAGES)
        tool = SearchTool(searcher, self.tokenizer, 500, show_ids=False)
        chat = ChatEnvironment(self.format, ToolSet([tool]), self.tokenizer)
        tags = SearchEnvironment(searcher, self.tokenizer, 500, "That was no action.")
        chat_turns, tag_turns = [], []
        for _ in range(SEARCHING):
            said: list[tuple[int, ...]] = []
            tagged: list[tuple[int, ...]] = []
            for _ in range(self.options.turns):
                query, thought = self._text(QUERY), self._text(THOUGHT)
                message = {"role": "assistant", "content": thought, "tool_calls": [self._call("search", query=query)]}
                said.append(self.format.turn(message))
                search = encode_text(self.tokenizer, f"<search> {query} </search>")
                filled = encode_text(self.tokenizer, thought + self._text(THOUGHT))[: len(said[-1]) - len(search)]
                tagged.append((*filled, *search))
            chat_turns.append([*said, self.format.turn({"role": "assistant", "content": "It is Sael."})])
            tag_turns.append([*tagged, encode_text(self.tokenizer, "<answer> Sael </answer>")])
        prompt = Prompt(tuple(encode_messages(self.tokenizer, ASKED)), "bench", {}, messages=ASKED)
        return Side(chat, self._prompt(chat), chat_turns), Side(tags, prompt, tag_turns)

    def _lengths(self, side: Side) -> str:
        """How long turns are, and what is read after them."""
        first = asyncio.run(self._play(Side(side.environment, side.prompt, side.turns[:16])))
        parts: dict[str, list[int]] = {"policy": [], "environment": []}
        for trajectory in first:
            for segment in trajectory.segments[1:-1]:
                parts[str(segment.source)].append(len(segment.ids))
        said, read = (statistics.mean(found) for found in parts.values())
        return f"{said:.0f} tokens said, {read:.0f} read in the mean"

    def _prompt(self, environment: ChatEnvironment) -> Prompt:
        return Prompt(environment.prompt_ids(ASKED), "bench", {}, messages=ASKED)

    def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}

    def _text(self, num_words: int) -> str:
        """Words without tags in them."""
        start = self.rng.randrange(len(self.words) - num_words)
        return " ".join(self.words[start : start + num_words]).replace("<", "").replace(">", "")


def _tools(seconds: float) -> list[Callable[..., Any]]:
    """Two coroutine functions and two plain ones, which take so long."""

    async def weather(place: int) -> str:
        """The weather at a place."""
        await asyncio.sleep(seconds)
        return f"sunny at {place}"

    async def traffic(place: int) -> str:
        """The traffic at a place."""
        await asyncio.sleep(seconds)
        return f"slow at {place}"

    def prices(place: int) -> str:
        """The prices at a place."""
        time.sleep(seconds)
        return f"high at {place}"

    def opening_hours(place: int) -> str:
        """The opening hours of a place."""
        time.sleep(seconds)
        return f"{place} is open"

    return [weather, traffic, prices, opening_hours]


if __name__ == "__main__":
    main()
