"""Questions of 1, 2 and 3 hops over a world, or of 8 to 12, as rows of the prompt table.

A question names one entity and a chain of relations. Each relation belongs to the kind of entity that the previous one
leads to, and no passage before the last states the last relation, so there is no shortcut.

Questions of `TOOL_KINDS` are about articles, and need more than searching for one name after the other.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from search_r1.data.tinywiki.world import PAGE_RELATIONS, RELATIONS, World, hash_number
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

MARATHON = range(8, 13)
"""Hops of the questions that are a walk along any relations, too long for a window."""

TOOL_KINDS = ("comparison", "page", "arithmetic", "unanswerable")
"""Which of two is older; a fact of an article's second passage; the years between two; a fact that nothing states."""

UNKNOWN = "unknown"
"""The right answer to a question that cannot be answered."""

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
    def name(self) -> str:
        """What the question is called in scores, e.g. `2hop`."""
        return f"{self.hops}hop"

    @property
    def key(self) -> tuple[object, ...]:
        """What two questions have in common only if they are the same."""
        return self.path[0], self.relations

    @property
    def kind(self) -> str:
        """The chain as text, e.g. `book.author.birthplace`; of a marathon its length and end, e.g. `9.mayor`."""
        if self.hops in MARATHON:
            return f"{self.hops}.{self.relations[-1]}"
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
        pronoun = "Who" if _OBJECTS[self.relations[-1]] == "person" else "What"
        nested = " of ".join(f"the {relation}" for relation in reversed(self.relations))
        return f"{pronoun} is {nested} of {self.world.title(self.path[0])}?"


_OBJECTS = {
    relation: kind
    for relations in (*PAGE_RELATIONS.values(), *RELATIONS.values())
    for relation, kind in relations.items()
}
"""Relation -> kind of the object."""


class PageQuestion(ChainQuestion):
    """A question about a fact in the second passage of an article, which a search for its title does not find."""

    @property
    def name(self) -> str:
        return "page"


class UnanswerableQuestion(ChainQuestion):
    """A question about a relation that entities of the kind do not have; `path` is the entity that it names."""

    @property
    def name(self) -> str:
        return "unanswerable"

    @property
    def targets(self) -> list[str]:
        return [UNKNOWN]

    @property
    def chain(self) -> list[str]:
        return [self.world.title(self.path[0])]


@dataclass(frozen=True)
class PairQuestion:
    """A question about the years of two entities of one kind; `name` is "comparison" or "arithmetic"."""

    world: World
    entities: tuple[int, int]
    name: str

    hops = 2

    @property
    def key(self) -> tuple[object, ...]:
        """See `ChainQuestion.key`."""
        return self.name, *self.entities

    @property
    def kind(self) -> str:
        """E.g. `comparison.book`."""
        return f"{self.name}.{self.world.kind(self.entities[0])}"

    @property
    def years(self) -> tuple[int, int]:
        """The years of the two, which differ."""
        first, second = self.entities
        return self.world.year(first), self.world.year(second)

    @property
    def targets(self) -> list[str]:
        """The accepted answers: the older of the two, or the number of years between them."""
        first, second = self.years
        if self.name == "arithmetic":
            return [str(abs(first - second))]
        return self.world.names(self.entities[0 if first < second else 1])

    @property
    def chain(self) -> list[str]:
        """The titles to look up, which can be done at once."""
        return [self.world.title(entity) for entity in self.entities]

    @property
    def text(self) -> str:
        """The question in English."""
        first, second = self.chain
        if self.name == "arithmetic":
            return f"How many years lie between {first} and {second}?"
        return f"Which is older, {first} or {second}?"


Question = ChainQuestion | PairQuestion


@overload
def make_question(world: World, kind: int, rng: random.Random) -> ChainQuestion: ...
@overload
def make_question(world: World, kind: int | str, rng: random.Random) -> Question: ...
def make_question(world: World, kind: int | str, rng: random.Random) -> Question:
    """Draw one question, of a number of hops or of one of `TOOL_KINDS`.

    Raises:
        DataError: there are no such questions.
    """
    if isinstance(kind, int):
        return _chain_question(world, kind, rng)
    if kind not in TOOL_KINDS or not world.articles:
        raise DataError(f"no questions of the kind {kind!r}; those of {TOOL_KINDS} are about a world with articles")
    # the kind of entity first, as for chains: there are more people than countries
    entities = world.entities(rng.choice(list(RELATIONS)))
    if kind in ("comparison", "arithmetic"):
        question = PairQuestion(world, (rng.choice(entities), rng.choice(entities)), kind)
        return question if len(set(question.years)) == 2 else make_question(world, kind, rng)
    entity = rng.choice(entities)
    on_page = list(PAGE_RELATIONS[world.kind(entity)])
    if kind == "page":
        relation = rng.choice(on_page)
        return PageQuestion(world, (relation,), (entity, world.fact(entity, relation)))
    stated = {*on_page, *RELATIONS[world.kind(entity)]}
    others = [relation for relations in RELATIONS.values() for relation in relations if relation not in stated]
    return UnanswerableQuestion(world, (rng.choice(others),), (entity,))


def _chain_question(world: World, hops: int, rng: random.Random) -> ChainQuestion:
    """Draw one question: a kind uniformly from `CHAINS[hops]`, or for more hops than there are there, a kind of entity
    and then each relation; then an entity uniformly."""
    if hops in CHAINS:
        kind, *relations = rng.choice(CHAINS[hops])
    elif hops in MARATHON:
        kind = last = rng.choice(list(RELATIONS))
        relations = []
        # A walk over kinds: each relation is one that the kind reached so far has.
        for _ in range(hops):
            relations.append(rng.choice(list(RELATIONS[last])))
            last = _OBJECTS[relations[-1]]
    else:
        raise DataError(f"no questions of {hops} hops; one of {sorted([*CHAINS, *MARATHON])}")
    entity = rng.choice(world.entities(kind))
    return ChainQuestion(world, tuple(relations), tuple(world.follow(entity, tuple(relations))))


def distinct_questions(world: World, kinds: Sequence[int | str], count: int) -> Iterator[Question]:
    """Yield `count` different questions, cycling through `kinds`: hop counts, or of `TOOL_KINDS`.

    Raises:
        DataError: the world is too small for that many different questions.
    """
    rng = random.Random(hash_number("questions", world.seed, world.name))
    seen: set[tuple[object, ...]] = set()
    for index in range(count):
        question = _unseen(world, kinds[index % len(kinds)], rng, seen)
        seen.add(question.key)
        yield question


def _unseen(world: World, kind: int | str, rng: random.Random, seen: set[tuple[object, ...]]) -> Question:
    for _ in range(1000):
        question = make_question(world, kind, rng)
        if question.key not in seen:
            return question
    which = f"{kind}-hop" if isinstance(kind, int) else kind
    raise DataError(f"world {world.name!r} has too few different {which} questions; raise its number of passages")


def load_template(name: str = TEMPLATE) -> templates.Template:
    """Return the prompt template, by default that of the mode with tags."""
    return templates.load_template(name)


def prompt_row(
    question: Question, template: templates.Template, split: str, index: int, evidence: Sequence[str] = ()
) -> dict[str, Any]:
    """Return one row of the prompt table (the published schema; hops, kind and chain in `extra_info`).

    `evidence` are the ids of the passages that the answer follows from, for its metadata.
    """
    described = {"metadata": json.dumps({"evidence": evidence})} if evidence else {}
    return {
        **described,
        "data_source": f"tinywiki_{question.name}",
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
