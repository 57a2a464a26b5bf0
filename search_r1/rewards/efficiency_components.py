"""What a trajectory costs: components for efficient search. They measure costs: give them negative weights."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.normalize import normalize_unicode
from search_r1.rewards.reading import Reading
from search_r1.rewards.text_counts import count_words


@component("search_cost")
class SearchCost:
    """The number of searches executed after the first `free` ones: 0, 1, 2, ... up to `max_turns`.

    A weight of -0.05 means a cost of 0.05 per search.
    """

    def __init__(self, free: int = 0) -> None:
        if free < 0:
            raise ValueError(f"free is {free}: give a number of searches, 0 or more")
        self.free = free

    def __call__(self, reading: Reading) -> float:
        return float(max(0, len(reading.queries) - self.free))


@component("repeated_query")
class RepeatedQuery:
    """The number of executed queries that repeat an earlier one of the trajectory, both normalised: 0, 1, 2, ...

    It is a count, not a share: a share would fall with every further search.
    """

    def __call__(self, reading: Reading) -> float:
        queries = [normalize_unicode(query) or query for query in reading.queries]
        return float(len(queries) - len(set(queries)))


@component("long_think")
class LongThink:
    """How far the reasoning exceeds `budget` words: 0 up to the budget, rising to 1 at twice the budget and beyond.

    Reasoning is everything that the policy wrote outside of its queries and answers, in all turns, in think tags or
    not: an unclosed tag hides nothing.
    """

    def __init__(self, budget: int = 500) -> None:
        if budget < 1:
            raise ValueError(f"budget is {budget}: give a number of words, 1 or more")
        self.budget = budget

    def __call__(self, reading: Reading) -> float:
        pieces = (piece for turn in reading.turns for piece in reading.grammar.parts(turn.text))
        reasoning = " ".join(text for text, kind in pieces if kind in ("think", ""))
        for tag in reading.grammar.tags:
            reasoning = reasoning.replace(tag, " ")
        words = count_words(reasoning)
        return min(1.0, max(0.0, words / self.budget - 1.0))
