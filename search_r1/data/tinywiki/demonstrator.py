"""The imperfect demonstrator, which writes the trajectories that the warm start imitates, and the index that it
searches.

It knows the tag grammar, can look up a name and can read one fact of one passage, which it notes while thinking. It
does not know how to search: it notes the requested fact if the passage states it, otherwise a random one. Then at
random, whatever the question, it answers with the name it noted or looks that name up. So it mostly answers 1-hop
questions correctly and rarely longer ones; the rest is left to reinforcement learning.

The training run searches through the retrieval server; the index here, BM25 in process, gives the same observation text
without one. It also measures the difficulty of questions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import bm25s

from search_r1.data.tinywiki.questions import ChainQuestion, Question
from search_r1.data.tinywiki.world import World
from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.llm_agent.observations import format_passage
from search_r1.llm_agent.templates import Template


@dataclass(frozen=True)
class WorldPassage:
    """One passage: the entity it is about (world name and number) and its text."""

    world: str
    entity: int
    contents: str

    @property
    def title(self) -> str:
        """The first line, quotes kept."""
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        return self.contents.split("\n", 1)[1]


class PassageIndex:
    """BM25 search over all passages of some worlds; answers are cached by query and topk."""

    def __init__(self, worlds: Sequence[World]) -> None:
        self.passages = [
            WorldPassage(world.name, entity, world.contents(entity))
            for world in worlds
            for entity in range(world.num_entities)
        ]
        self._retriever = bm25s.BM25()
        self._retriever.index(_tokenize([passage.contents for passage in self.passages]), show_progress=False)
        self._cache: dict[tuple[str, int], list[WorldPassage]] = {}

    def search(self, queries: Sequence[str], topk: int) -> list[list[WorldPassage]]:
        """Return up to `topk` passages per query, best first."""
        missing = sorted({query for query in queries if (query, topk) not in self._cache})
        if missing:
            documents, _ = self._retriever.retrieve(
                _tokenize(missing), k=min(topk, len(self.passages)), show_progress=False
            )
            for query, row in zip(missing, documents, strict=True):
                self._cache[query, topk] = [self.passages[number] for number in row]
        return [self._cache[query, topk] for query in queries]


def _tokenize(texts: list[str]) -> list[list[str]]:
    return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def observation(passages: Sequence[WorldPassage]) -> str:
    """Return the text the environment shows for a search, the same bytes as in training."""
    return SEARCH_R1.wrap_information("".join(format_passage(i, p.contents) for i, p in enumerate(passages, start=1)))


Segment = tuple[str, str]
"""(source, text); source is "prompt", "policy" or "environment"."""


@dataclass(frozen=True)
class Habits:
    """The probabilities with which the demonstrator errs.

    Attributes:
        start: probability of looking up the entity that the question names; else it looks up half of its name.
        stop: probability of answering after a passage, the same for every question.
        next_hop: probability of noting the fact that leads on, in a passage without the requested one.
        max_searches: it answers after this many searches at the latest.
        both: chat mode, a question about two entities: probability of looking up both; else it looks up the first.
        calculate: chat mode, the years of two are read: probability of using the calculator; else it answers a year.
        open_page: chat mode, no fact of the first passage leads on: probability of opening the page.
        unknown: as `open_page`, probability of answering "unknown".
    """

    start: float = 0.95
    stop: float = 0.65
    next_hop: float = 0.6
    max_searches: int = 2
    both: float = 0.4
    calculate: float = 0.45
    open_page: float = 0.22
    unknown: float = 0.14


@dataclass
class Demonstrator:
    """Writes trajectories about the world of each question; a search shows it one passage.

    Attributes:
        index: BM25 over a world with the same names. The facts may differ: a search for a name, or for half of one,
            finds the passage with that title, whatever it states.
        template: the prompt template.
        habits: how it errs.
    """

    index: PassageIndex
    template: Template
    habits: Habits

    def write(self, question: Question, rng: random.Random) -> list[Segment]:
        """Return one trajectory as segments: the prompt, then policy and environment turns in alternation."""
        assert isinstance(question, ChainQuestion), "questions about two entities are for the chat mode"
        world, title = question.world, question.chain[0]
        # The first query is the whole title or one word of it: either finds the passage.
        query = title if rng.random() < self.habits.start else rng.choice(title.split())
        thought = f"Look up {query}"
        segments = [("prompt", self.template.messages(question.text)[0]["content"])]
        for num_searches in range(1, self.habits.max_searches + 1):
            [[found]] = self.index.search([query], topk=1)
            passage = WorldPassage(world.name, found.entity, world.contents(found.entity))
            segments += [("policy", search_turn(thought, query)), ("environment", observation([passage]))]
            # The noted name, right or wrong, is the next query, or the answer once it stops.
            relation, query = note_fact(question, found.entity, self.habits, rng)
            thought = f"{relation} {query}"
            if num_searches == self.habits.max_searches or rng.random() < self.habits.stop:
                break
        return [*segments, ("policy", answer_turn(thought, query))]


def note_fact(question: ChainQuestion, entity: int, habits: Habits, rng: random.Random) -> tuple[str, str]:
    """The fact that the demonstrator notes of the passage about `entity`, as (relation, name)."""
    facts = question.world.facts(entity)
    *leading, last = question.relations
    if last in facts:
        return last, facts[last]
    right = [relation for relation in facts if relation in leading]
    wrong = [relation for relation in facts if relation not in leading]
    take_right = rng.random() < habits.next_hop
    relation = rng.choice((right if take_right else wrong) or list(facts))
    return relation, facts[relation]


def search_turn(thought: str, query: str) -> str:
    """A policy turn that searches; the turn ends at the closing tag."""
    return f"<think> {thought}</think><search> {query}</search>"


def answer_turn(thought: str, answer: str) -> str:
    """A policy turn that answers; the turn ends at the closing tag."""
    return f"<think> {thought}</think><answer> {answer}</answer>"
