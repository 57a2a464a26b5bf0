"""A fictional encyclopedia whose facts are a hash of (seed, world, entity, relation), and whose names are numbers.

An entity is a number `0 <= entity < world.num_entities`; its kind follows from the number, its title from the name
bijection and each of its two facts from a hash. Nothing is stored, so a world of a million passages streams in constant
memory. Worlds own disjoint slot ranges of the names: no title and no alias occurs in two worlds.

The names are a bijection between slot numbers and sets of words: every title and alias is a few words of one closed
set, so a small tokenizer covers all worlds. No two names consist of the same words in another order: a bag-of-words
search could not distinguish them. With W words, the first `W choose 2` slots are two-word names, the next `W choose 3`
three-word names, and so on.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import comb, gcd

from verl.errors import DataError

ONSETS = (
    "Bar",
    "Cal",
    "Dor",
    "Fen",
    "Gal",
    "Hel",
    "Jor",
    "Kel",
    "Lan",
    "Mor",
    "Nol",
    "Pel",
    "Rav",
    "Sel",
    "Tor",
    "Vel",
)
CODAS = ("ba", "den", "fis", "gon", "hai", "kir", "lum", "mar", "nis", "pet", "rud", "sto", "wyn")
WORDS = tuple(onset + coda for onset in ONSETS for coda in CODAS)
MIN_WORDS = 2


def name_of(slot: int, seed: int) -> str:
    """Return the name of a slot: different words joined by one space.

    Args:
        slot: 0, 1, 2, ...; two slots never give the same name under one seed.
        seed: shuffles which slot gets which name.
    """
    num_words, rank = _length_and_rank(slot)
    factor, shift = _affine(comb(len(WORDS), num_words), seed, num_words)
    rank = (rank * factor + shift) % comb(len(WORDS), num_words)
    words = _combination(rank, num_words)
    return " ".join(words if rank % 2 else reversed(words))


def _length_and_rank(slot: int) -> tuple[int, int]:
    num_words = MIN_WORDS
    while slot >= comb(len(WORDS), num_words):
        slot -= comb(len(WORDS), num_words)
        num_words += 1
    return num_words, slot


def _combination(rank: int, num_words: int) -> list[str]:
    """The rank-th set of `num_words` words in the combinatorial number system, largest word first."""
    words = []
    for left in range(num_words, 0, -1):
        column = _column(left)
        index = bisect_right(column, rank) - 1
        rank -= column[index]
        words.append(WORDS[index])
    return words


@lru_cache(maxsize=16)
def _column(left: int) -> list[int]:
    return [comb(index, left) for index in range(len(WORDS))]


@lru_cache(maxsize=256)
def _affine(size: int, seed: int, salt: int) -> tuple[int, int]:
    factor = hash_number("name-factor", seed, salt) % size
    while gcd(factor, size) != 1:
        factor = (factor + 1) % size
    return factor, hash_number("name-shift", seed, salt) % size


def hash_number(*parts: object) -> int:
    """Return a 64-bit number that depends on nothing but the parts (the same on every machine and run)."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


KINDS = ("person", "city", "country", "company", "book")
SHARES = {"person": 30, "city": 20, "country": 10, "company": 20, "book": 20}
"""Percent of a world's entities that are of each kind."""

RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"birthplace": "city", "employer": "company"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"president": "person", "airline": "company"},
    "company": {"seat": "city", "founder": "person"},
    "book": {"author": "person", "setting": "city"},
}
"""kind -> relation -> kind of the object, in the order in which a passage states them."""

PAGE_RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {"patron": "person", "bank": "company"},
    "city": {"patron": "person", "port": "city"},
    "country": {"bank": "company", "port": "city"},
    "company": {"patron": "person", "port": "city"},
    "book": {"patron": "person", "bank": "company"},
}
"""As `RELATIONS`, for what an article states in its second passage."""

FIRST_YEAR, NUM_YEARS = 10, 90
"""Years have two digits, each of which is a token."""

MAX_DRAWS = 32
"""Draws of a fact after which a shared word is accepted."""

ALIASED_PERCENT = 25
"""Percent of the countries that have a second name."""


@lru_cache(maxsize=64)
def _ranges(num_entities: int) -> dict[str, range]:
    """Kind -> its entity numbers; the last kind takes what rounding leaves, so that every entity has a kind."""
    ranges = {}
    start = 0
    for kind in KINDS:
        stop = num_entities if kind == KINDS[-1] else start + num_entities * SHARES[kind] // 100
        ranges[kind] = range(start, stop)
        start = stop
    return ranges


@dataclass(frozen=True)
class World:
    """One self-contained world.

    Attributes:
        name: "sft", "train", "validation" or "test"; part of every fact's hash.
        seed: seed of names and facts.
        num_entities: number of entities, each of which has a passage or an article.
        first_slot: first name slot this world owns; it owns `num_slots` of them.
        articles: whether an entity has an article of two passages, of which the first also states a year.
    """

    name: str
    seed: int
    num_entities: int
    first_slot: int
    articles: bool = False

    def __post_init__(self) -> None:
        if self.num_entities < 20:
            raise DataError(f"world {self.name!r}: {self.num_entities} entities are too few for five kinds; give >= 20")

    @property
    def num_slots(self) -> int:
        """Names this world owns: a title for every entity and an alias for every country."""
        return self.num_entities + len(self.entities("country"))

    def entities(self, kind: str) -> range:
        """Return the numbers of all entities of a kind."""
        return _ranges(self.num_entities)[kind]

    def kind(self, entity: int) -> str:
        """Return the kind of an entity."""
        return next(kind for kind, numbers in _ranges(self.num_entities).items() if entity in numbers)

    def title(self, entity: int) -> str:
        """Return the title of an entity, unique over all worlds of one plan."""
        return name_of(self.first_slot + entity, self.seed)

    def alias(self, entity: int) -> str | None:
        """Return the second name of an entity, or None when it has none."""
        countries = self.entities("country")
        if entity not in countries or hash_number(self.seed, self.name, entity, "alias") % 100 >= ALIASED_PERCENT:
            return None
        return name_of(self.first_slot + self.num_entities + entity - countries.start, self.seed)

    def names(self, entity: int) -> list[str]:
        """Return the title and, where there is one, the alias."""
        alias = self.alias(entity)
        return [self.title(entity)] if alias is None else [self.title(entity), alias]

    def fact(self, entity: int, relation: str) -> int:
        """Return the entity that stands in `relation` to `entity` (its birthplace, its mayor, ...).

        No two names of one passage share a word (as far as the world's size allows). So a passage repeats only words of
        its own title, and a bag-of-words search for a title ranks its passage first.
        """
        used = set(self.title(entity).split())
        on_page = PAGE_RELATIONS[self.kind(entity)] if self.articles else {}
        for other, kind in (*RELATIONS[self.kind(entity)].items(), *on_page.items()):
            found = self._draw(entity, other, kind, used)
            if other == relation:
                return found
            used |= set(self.title(found).split())
        raise DataError(f"a {self.kind(entity)} has no relation {relation!r}")

    def facts(self, entity: int) -> dict[str, str]:
        """Return what the passage of `entity` states: relation -> title, in the order of the passage."""
        return {relation: self.title(self.fact(entity, relation)) for relation in RELATIONS[self.kind(entity)]}

    def page_facts(self, entity: int) -> dict[str, str]:
        """Return what the second passage of the article states: relation -> title."""
        return {relation: self.title(self.fact(entity, relation)) for relation in PAGE_RELATIONS[self.kind(entity)]}

    def year(self, entity: int) -> int:
        """Return the year of an entity, from `FIRST_YEAR` on; only articles state it."""
        return FIRST_YEAR + hash_number(self.seed, self.name, entity, "year") % NUM_YEARS

    def _draw(self, entity: int, relation: str, kind: str, used: set[str]) -> int:
        candidates = self.entities(kind)
        for attempt in range(MAX_DRAWS):
            number = hash_number(self.seed, self.name, entity, relation, attempt)
            found = candidates[number % len(candidates)]
            if used.isdisjoint(self.title(found).split()):
                break
        return found

    def follow(self, entity: int, relations: tuple[str, ...]) -> list[int]:
        """Return the entities met on the way from `entity` along `relations`, both ends included."""
        path = [entity]
        for relation in relations:
            path.append(self.fact(path[-1], relation))
        return path

    def text(self, entity: int) -> str:
        """Return the body of an entity's passage: what it is, its two facts and, where there is one, its alias.

        In an article it also states the year.
        """
        facts = [f"{relation} {name}" for relation, name in self.facts(entity).items()]
        alias = self.alias(entity)
        known_as = f", also known as {alias}," if alias else ""
        dated = f", dated {self.year(entity)}" if self.articles else ""
        return f"{self.title(entity)}{known_as} is a {self.kind(entity)} with {' and '.join(facts)}{dated}."

    def contents(self, entity: int) -> str:
        """Return the passage in the wiki-18 layout: the quoted title, a newline, the text."""
        return f'"{self.title(entity)}"\n{self.text(entity)}'

    def second_text(self, entity: int) -> str:
        """Return the body of the second passage of an article, without the name: a search finds the first one."""
        facts = [f"{relation} {name}" for relation, name in self.page_facts(entity).items()]
        return f"And with {' and '.join(facts)}."


def plan_worlds(seed: int, sizes: Mapping[str, int], articles: bool = False) -> dict[str, World]:
    """Return one world per entry of `sizes` (name -> number of passages), with disjoint names.

    Raises:
        DataError: a world is too small.
    """
    worlds: dict[str, World] = {}
    first_slot = 0
    for name, size in sizes.items():
        worlds[name] = World(name=name, seed=seed, num_entities=size, first_slot=first_slot, articles=articles)
        first_slot += worlds[name].num_slots
    return worlds


def stream_passages(worlds: list[World]) -> Iterator[dict[str, str]]:
    """Yield the rows of a corpus, `{"id", "contents"}`, in constant memory.

    The ids are "0", "1", ... in order. The two passages of an article follow each other, and the id of the first is its
    title, which a small policy can copy.
    """
    row = 0
    for world in worlds:
        for entity in range(world.num_entities):
            title = world.title(entity)
            yield {"id": title if world.articles else str(row), "contents": world.contents(entity)}
            if world.articles:
                yield {"id": f"{title}, part 2", "contents": f'"{title}"\n{world.second_text(entity)}'}
            row += 1
