"""The imperfect demonstrator of TinyWiki's chat mode, which calls tools.

It errs as the one with tags does (`search_r1.data.tinywiki.demonstrator`): it can look up a name and read one fact, and
then answers or goes on by chance, whatever was asked. Which of its choices is right is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from search_r1.data.tinywiki.chat import answers, call, says, segments_of, tool_schemas
from search_r1.data.tinywiki.demonstrator import Habits, PassageIndex, Segment, note_fact
from search_r1.data.tinywiki.questions import ChainQuestion
from search_r1.data.tinywiki.world import World
from search_r1.llm_agent.observations import format_passage
from search_r1.llm_agent.templates import Template
from verl.agent.formats import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def search_result(world: World, entity: int) -> str:
    """What the tool search gives for a query that finds the passage of `entity`."""
    title, _, text = world.contents(entity).partition("\n")
    return format_passage(1, f"{title}, id: {world.title(entity)}\n{text}").strip()


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

    def write(self, question: ChainQuestion, rng: random.Random) -> list[Segment]:
        """Return one trajectory as segments: the prompt, then policy and environment turns in alternation."""
        messages = [*self.template.messages(question.text), *self._chain(question, rng)]
        return segments_of(self.tokenizer, messages, self._tools)

    def _chain(self, question: ChainQuestion, rng: random.Random) -> list[Message]:
        """Looks a name up, notes a fact, and answers with it or looks it up, by chance."""
        title = question.chain[0]
        query = title if rng.random() < self.habits.start else rng.choice(title.split())
        note, messages = f"Look up {query}", []
        for num_searches in range(1, self.habits.max_searches + 1):
            entity = self._find(query)
            messages += [says(note, call("search", query=query)), _result("search", question.world, entity)]
            relation, query = note_fact(question, entity, self.habits, rng)
            note = f"{relation} {query}"
            if num_searches == self.habits.max_searches or rng.random() < self.habits.stop:
                break
        return [*messages, answers(note, query)]

    def _find(self, query: str) -> int:
        [[found]] = self.index.search([query], topk=1)
        return found.entity


def _result(tool: str, world: World, entity: int) -> Message:
    return {"role": "tool", "name": tool, "content": search_result(world, entity)}
