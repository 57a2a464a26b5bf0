"""What a demonstration says: its queries by strategy, and the short thoughts before its actions.

| strategy | queries |
|---|---|
| question | the question |
| keywords | its words without those that say nothing about its subject |
| title | the title of the gold passage, if there is one only, or if the question names it |
| hops | the titles of all gold passages in their order, those that the question names first; it must name one |
| bridge | the question, then the title of the last gold passage, if the question does not name it |

Titles are in the metadata of a question (`search_r1.data.qa.paragraphs.gold_titles`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_r1.data.corpus.answer_matching import names
from text_file import read_text
from verl.errors import ConfigError

STRATEGIES = ("question", "keywords", "title", "hops", "bridge")
_EMPTY_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the of in on at to for from by with is was were are be been do does did has have had who whom "
        "whose what which when where why how many much that this these those and or as its it their his her "
        "he she they there into than then also both name",
    )
)
_WORD = re.compile(r"[\w'.-]+")

THOUGHTS: Mapping[str, Sequence[str]] = {
    "search": (
        "I need to look this up.",
        "I do not know this, so I search for it.",
        "Let me find a passage about it.",
        "First I search for {query}.",
    ),
    "next": (
        "I need one more fact.",
        "Now I look up {query}.",
        "The passage leads on to {query}.",
    ),
    "answer": (
        "The passage has the answer.",
        "I have found it.",
        "Now I know the answer: {answer}.",
    ),
}
"""Thoughts before the first search, before a further one, and before the answer."""


@dataclass(frozen=True)
class Plan:
    """The queries of a demonstration, in their order."""

    strategy: str
    queries: tuple[str, ...]


def plans_of(question: str, titles: Sequence[str], strategies: Sequence[str] = STRATEGIES) -> list[Plan]:
    """A plan for each of the `strategies` that the question has, without those whose queries another has already.

    `titles` are those of its gold passages, in the order of the data.
    """
    named = sorted(titles, key=lambda title: not names(question, title))  # sorting keeps the order of equals
    queries: dict[str, Sequence[str]] = {"question": [question], "keywords": [key_words(question)]}
    if len(named) == 1 or (named and names(question, named[0])):
        queries["title"] = named[:1]
    if len(named) > 1 and names(question, named[0]):
        queries["hops"] = named
    if len(named) > 1 and not names(question, named[-1]):
        queries["bridge"] = [question, named[-1]]
    plans = [Plan(strategy, tuple(queries[strategy])) for strategy in strategies if all(queries.get(strategy, [""]))]
    return list({plan.queries: plan for plan in reversed(plans)}.values())[::-1]


def key_words(question: str) -> str:
    """The words of an English question that say what it is about, in their order; "" if there is none."""
    words = (word.strip(".'-") for word in _WORD.findall(question))
    return " ".join(word for word in words if word and word.lower() not in _EMPTY_WORDS)


class Thoughts:
    """A pool of sentences for each place: `search`, `next` and `answer`."""

    def __init__(self, pools: Mapping[str, Sequence[str]] = THOUGHTS) -> None:
        self._pools = pools

    @classmethod
    def read(cls, path: Path) -> Thoughts:
        """The pools of a text file with lines such as `search: I look up {query}.`

        Raises `ConfigError`, with the number of the line, for a line that is something else, and for a missing place.
        """
        pools: dict[str, list[str]] = {place: [] for place in THOUGHTS}
        for number, line in enumerate(read_text(path, ConfigError).split("\n"), start=1):
            place, _, sentence = (part.strip() for part in line.partition(":"))
            if not line.strip():
                continue
            if place not in pools or not sentence or "<" in sentence:
                raise ConfigError(
                    f"{path}:{number}: a line is {', '.join(pools)} with a colon and a sentence without a tag, such as "
                    "'search: I look up {query}.'"
                )
            pools[place].append(sentence)
        if empty := [place for place, sentences in pools.items() if not sentences]:
            raise ConfigError(f"{path}: there is no sentence for {', '.join(empty)}; add a line '{empty[0]}: ...'")
        return cls(pools)

    def draw(self, place: str, rng: random.Random, **values: str) -> str:
        """A sentence for the place, with `{query}` or `{answer}` replaced."""
        sentence = rng.choice(self._pools[place])
        return re.sub(r"\{(query|answer)\}", lambda slot: values.get(slot[1], slot[0]), sentence)
