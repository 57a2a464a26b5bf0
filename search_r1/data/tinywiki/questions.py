"""Questions of 1, 2 and 3 hops over a world, as rows of the prompt table.

A question names one entity and a chain of relations. Each relation belongs to the kind of entity that the previous one
leads to, and no passage before the last states the last relation, so there is no shortcut.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from search_r1.data.tinywiki.world import World, hash_number
from search_r1.llm_agent import templates
from verl.errors import DataError

CHAINS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: (
        ("book", "author"),
        ("person", "birthplace"),
        ("person", "employer"),
        ("company", "seat"),
        ("company", "founder"),
        ("city", "mayor"),
        ("city", "country"),
        ("country", "president"),
    ),
    2: (
        ("book", "author", "birthplace"),
        ("person", "employer", "founder"),
        ("person", "birthplace", "mayor"),
        ("company", "seat", "country"),
    ),
    3: (
        ("book", "author", "birthplace", "mayor"),
        ("book", "author", "employer", "founder"),
        ("person", "birthplace", "country", "airline"),
        ("company", "seat", "country", "president"),
    ),
}
"""Hops -> question kinds, each the kind of the named entity and the relations to follow from it."""

TEMPLATE = "tinywiki"


@dataclass(frozen=True)
class ChainQuestion:
    """One question about one world.

    Attributes:
        world: the world it is about.
        relations: the relations to follow, first hop first.
        path: the entities met on the way; the first is named in the question, the last is the answer.
    """

    world: World
    relations: tuple[str, ...]
    path: tuple[int, ...]

    @property
    def hops(self) -> int:
        return len(self.relations)

    @property
    def kind(self) -> str:
        """The chain as text, e.g. `book.author.birthplace`."""
        return ".".join((self.world.kind(self.path[0]), *self.relations))

    @property
    def targets(self) -> list[str]:
        """The accepted answers: the title and, where there is one, the alias."""
        return self.world.names(self.path[-1])

    @property
    def chain(self) -> list[str]:
        """The titles to look up, in order."""
        return [self.world.title(entity) for entity in self.path[:-1]]

    @property
    def text(self) -> str:
        """The question in English, e.g. `What is the birthplace of the author of Fenlum Galsto?`"""
        pronoun = "Who" if self.world.kind(self.path[-1]) == "person" else "What"
        nested = " of ".join(f"the {relation}" for relation in reversed(self.relations))
        return f"{pronoun} is {nested} of {self.world.title(self.path[0])}?"


def make_question(world: World, hops: int, rng: random.Random) -> ChainQuestion:
    """Draw one question: a kind uniformly from `CHAINS[hops]`, then an entity uniformly.

    Raises:
        DataError: there are no questions of that many hops.
    """
    if hops not in CHAINS:
        raise DataError(f"no questions of {hops} hops; one of {sorted(CHAINS)}")
    kind, *relations = rng.choice(CHAINS[hops])
    entity = rng.choice(world.entities(kind))
    return ChainQuestion(world, tuple(relations), tuple(world.follow(entity, tuple(relations))))


def distinct_questions(world: World, hops: Sequence[int], count: int) -> Iterator[ChainQuestion]:
    """Yield `count` different questions, cycling through the hop counts of `hops`.

    Raises:
        DataError: the world is too small for that many different questions.
    """
    rng = random.Random(hash_number("questions", world.seed, world.name))
    seen: set[tuple[int, tuple[str, ...]]] = set()
    for index in range(count):
        question = _unseen(world, hops[index % len(hops)], rng, seen)
        seen.add((question.path[0], question.relations))
        yield question


def _unseen(world: World, hops: int, rng: random.Random, seen: set[tuple[int, tuple[str, ...]]]) -> ChainQuestion:
    for _ in range(1000):
        question = make_question(world, hops, rng)
        if (question.path[0], question.relations) not in seen:
            return question
    raise DataError(f"world {world.name!r} has too few different {hops}-hop questions; raise its number of passages")


def load_template(name: str = TEMPLATE) -> templates.Template:
    """Return the prompt template, by default that of the mode with tags."""
    return templates.load_template(name)


def prompt_row(question: ChainQuestion, template: templates.Template, split: str, index: int) -> dict[str, Any]:
    """Return one row of the prompt table (the published schema; hops, kind and chain in `extra_info`)."""
    return {
        "data_source": f"tinywiki_{question.hops}hop",
        "prompt": template.messages(question.text),
        "question": question.text,
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": question.targets}},
        "extra_info": {
            "split": split,
            "index": index,
            "hops": question.hops,
            "kind": question.kind,
            "chain": question.chain,
        },
    }
