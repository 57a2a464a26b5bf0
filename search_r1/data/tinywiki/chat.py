"""TinyWiki for a chat model that calls tools (`search_r1.data.chat_template`): conversations of an imperfect
demonstrator as warm-start rows.

It errs as the one with tags does (`search_r1.data.tinywiki.demonstrator`): it can look up a name and read one fact, and
then answers or goes on by chance, whatever was asked. Which of its choices is right is left to reinforcement learning.

A word is another token at the beginning of a text than after a space. Conversations therefore write words that are
copied with a space before them, as they are read in passages and questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from search_r1.data.tinywiki.demonstrator import Habits, PassageIndex, Segment, note_fact
from search_r1.data.tinywiki.questions import (
    UNKNOWN,
    ChainQuestion,
    PageQuestion,
    PairQuestion,
    Question,
    UnanswerableQuestion,
)
from search_r1.data.tinywiki.world import World
from search_r1.llm_agent.observations import format_passage
from search_r1.llm_agent.templates import Template
from search_r1.tools.calculator import calculate
from verl.agent.formats import Message
from verl.agent.tools import load_tools
from verl.config import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG_NAME = "tinywiki_chat"
"""The config of the runs; the tools in the prompts of the warm start are those of `agent.tools` there."""

TEMPLATE = "tinywiki_chat"
"""The prompt template, a short one."""

CALL_TAGS = ("<tool_call>", "</tool_call>")
TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

_TURN = re.compile(r"(?<=<\|im_start\|>assistant\n)(.*?<\|im_end\|>)", re.DOTALL)


def tool_schemas(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The tools of `CONFIG_NAME` in the form that a chat template takes."""
    config = load_config(CONFIG_NAME)
    return load_tools(config.agent.tools, config, tokenizer).schemas()


def call(name: str, **arguments: str) -> Mapping[str, Any]:
    """A tool call of a turn; the values are written with a space before them, which the tools do not read."""
    spaced = {key: f" {value}" for key, value in arguments.items()}
    return {"type": "function", "function": {"name": name, "arguments": spaced}}


def says(text: str, *calls: Mapping[str, Any]) -> Message:
    """A turn of the policy: a note, and the calls that follow from it."""
    return {"role": "assistant", "content": f" {text}", "tool_calls": list(calls)}


def answers(note: str, answer: str) -> Message:
    """A turn of the policy that ends the conversation."""
    return says(f"{note} <answer> {answer} </answer>")


def segments_of(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Segment]:
    """A conversation as the segments of a warm-start row: the prompt, then turns and what the policy reads after them.

    The segments are cut where a run has them: a turn begins after the generation prompt and ends with `TURN_END`.
    """
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tools=[dict(tool) for tool in tools], tokenize=False
    )
    first, *rest = _TURN.split(str(text))
    sources = ("policy", "environment")
    # what follows the last turn is only the line break of the template
    return [("prompt", first), *((sources[place % 2], part) for place, part in enumerate(rest[:-1]))]


def search_result(world: World, entity: int) -> str:
    """What the tool search gives for a query that finds the passage of `entity`."""
    title, _, text = world.contents(entity).partition("\n")
    return format_passage(1, f"{title}, id: {world.title(entity)}\n{text}").strip()


def page_result(world: World, entity: int) -> str:
    """What the tool open_page gives for the article of `entity`."""
    return f"Title: {world.title(entity)}\n{world.text(entity)}\n{world.second_text(entity)}"


@dataclass
class ChatDemonstrator:
    """Writes conversations about the world of each question; a search shows it one passage.

    Attributes:
        index: BM25 over a world with the same names, as in `search_r1.data.tinywiki.demonstrator.Demonstrator`.
        template: the prompt template.
        habits: how it errs.
        tokenizer: one with TinyWiki's chat template; its vocabulary does not matter.
    """

    index: PassageIndex
    template: Template
    habits: Habits
    tokenizer: PreTrainedTokenizerBase
    _tools: Sequence[Mapping[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self._tools = tool_schemas(self.tokenizer)

    def write(self, question: Question, rng: random.Random) -> list[Segment]:
        """Return one trajectory as segments: the prompt, then policy and environment turns in alternation."""
        turns = self._pair(question, rng) if isinstance(question, PairQuestion) else self._chain(question, rng)
        return segments_of(self.tokenizer, [*self.template.messages(question.text), *turns], self._tools)

    def _chain(self, question: ChainQuestion, rng: random.Random) -> list[Message]:
        """Looks a name up, notes a fact, and answers with it or looks it up, by chance.

        If no fact of the first passage leads on, it may also open the page or give up, whether or not that is right.
        """
        title = question.chain[0]
        query = title if rng.random() < self.habits.start else rng.choice(title.split())
        note, messages = f"Look up {query}", []
        for num_searches in range(1, self.habits.max_searches + 1):
            [[found]] = self.index.search([query], topk=1)
            entity = found.entity
            messages += [
                says(note, call("search", query=query)),
                _told("search", search_result(question.world, entity)),
            ]
            # a fact that the passage lacks: it may be on the page, or nowhere
            if num_searches == 1 and isinstance(question, PageQuestion | UnanswerableQuestion):
                choice = rng.random()
                if choice < self.habits.open_page:
                    return [*messages, *self._open(question, entity)]
                if choice < self.habits.open_page + self.habits.unknown:
                    return [*messages, answers("not stated", UNKNOWN)]
            relation, query = note_fact(question, entity, self.habits, rng)
            note = f"{relation} {query}"
            if num_searches == self.habits.max_searches or rng.random() < self.habits.stop:
                break
        return [*messages, answers(note, query)]

    def _open(self, question: ChainQuestion, entity: int) -> list[Message]:
        """Opens the page of a passage and reads what was asked for, if it is there."""
        world, title, relation = question.world, question.world.title(entity), question.relations[-1]
        opened = [says(f"Open {title}", call("open_page", id=title)), _told("open_page", page_result(world, entity))]
        found = world.page_facts(entity).get(relation)
        return [*opened, answers(f"{relation} {found}", found) if found else answers("not stated", UNKNOWN)]

    def _pair(self, question: PairQuestion, rng: random.Random) -> list[Message]:
        """Looks up both entities in one turn, or the first alone. With both years it knows the older one, and what to
        ask the calculator; it does not always ask. Otherwise it answers with the first year."""
        world, years = question.world, question.years
        titles = question.chain if (both := rng.random() < self.habits.both) else question.chain[:1]
        messages: list[Message] = [
            says(f"Look up {' and '.join(titles)}", *(call("search", query=title) for title in titles)),
            *(_told("search", search_result(world, entity)) for entity in question.entities[: len(titles)]),
        ]
        note = ", ".join(f"dated {year}" for year in years[: len(titles)])
        if question.name == "comparison" and both:
            older = "first" if years[0] < years[1] else "second"
            return [*messages, answers(f"{note}, so the {older}", question.targets[0])]
        if question.name == "arithmetic" and both and rng.random() < self.habits.calculate:
            expression = f"abs( {years[0]} - {years[1]} )"
            value = calculate(expression)
            messages += [says(note, call("calculator", expression=expression)), _told("calculator", value)]
            return [*messages, answers(f"{value} years", value)]
        return [*messages, answers(note, str(years[0]))]


def _told(tool: str, text: str) -> Message:
    return {"role": "tool", "name": tool, "content": text}
