"""What a trajectory cost: components for efficient search. They count what is not wanted: weigh them negatively."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.normalize import normalize_unicode
from search_r1.rewards.reading import Reading
from search_r1.rewards.words import count_words


@component("search_cost")
class SearchCost:
    """How many searches were executed beyond the first `free` ones: 0, 1, 2, ... up to `max_turns`.

    A weight of -0.05 is a price of 0.05 a search.
    """

    def __init__(self, free: int = 0) -> None:
        if free < 0:
            raise ValueError(f"free is {free}: give a number of searches, 0 or more")
        self.free = free

    def __call__(self, reading: Reading) -> float:
        return float(max(0, len(reading.queries) - self.free))


@component("repeated_query")
class RepeatedQuery:
    """How many executed queries repeat an earlier one of the trajectory, both normalised: 0, 1, 2, ...

    It is a number and not a share: a share would fall with every further search.
    """

    def __call__(self, reading: Reading) -> float:
        queries = [normalize_unicode(query) or query for query in reading.queries]
        return float(len(queries) - len(set(queries)))


@component("long_think")
class LongThink:
    """By how much the reasoning is longer than `budget` words: 0 within it, rising to 1 at twice the budget and above.

    Reasoning is what the policy wrote outside of its queries and answers, over all turns, in think tags or not:
    leaving a tag open hides nothing.
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
