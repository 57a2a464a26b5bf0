"""Components for what a trajectory costs, to which a reward gives negative weights, and counts in what the policy
wrote: tags, for formats that are defined by their number, and words in any script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from search_r1.llm_agent.transcript import Turn
from search_r1.rewards.component import component
from search_r1.rewards.metrics import normalize_unicode
from search_r1.rewards.reading import Reading
from search_r1.search.scripts import JOINERS, MARKS, UNSPACED_LETTERS

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and ideographs: written without spaces
_WORD = re.compile(rf"[{_CJK}]|[{UNSPACED_LETTERS}]{{1,4}}|(?:[^\W{_CJK}{UNSPACED_LETTERS}][{MARKS}{JOINERS}]*)+")
_CJK_LETTER = re.compile(rf"[{_CJK}]")


def count(turns: Sequence[Turn], literal: str) -> int:
    """How often the policy wrote a text, such as "<think>"."""
    return sum(turn.text.count(literal) for turn in turns)


def num_pairs(turns: Sequence[Turn], tag: str | None) -> int | None:
    """How often the policy wrote `<tag>`; None if it did not write `</tag>` as often. 0 if `tag` is None."""
    if tag is None:
        return 0
    opened = count(turns, f"<{tag}>")
    return opened if opened == count(turns, f"</{tag}>") else None


def count_words(text: str) -> int:
    """The number of runs of letters with their marks, digits and underscores; each CJK character counts as a word.

    So do up to four characters of another script without spaces, such as Thai.
    """
    return sum(1 for _ in _WORD.finditer(text))


def has_cjk(text: str) -> bool:
    """Whether the text contains a kana or an ideograph."""
    return _CJK_LETTER.search(text) is not None


@component("search_cost")
class SearchCost:
    """The number of queries searched for after the first `free` ones: 0, 1, 2, ...; a tool call may have several.

    A weight of -0.05 means a cost of 0.05 per query.
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

    Reasoning is everything that the policy wrote outside of its queries, tool calls and answers, in all turns, in think
    tags or not: an unclosed tag hides nothing.
    """

    def __init__(self, budget: int = 500) -> None:
        if budget < 1:
            raise ValueError(f"budget is {budget}: give a number of words, 1 or more")
        self.budget = budget

    def __call__(self, reading: Reading) -> float:
        reasoning = " ".join(
            reading.grammar.reasoning(turn.text) if turn.reasoning is None else turn.reasoning for turn in reading.turns
        )
        for tag in reading.grammar.tags:
            reasoning = reasoning.replace(tag, " ")
        words = count_words(reasoning)
        return min(1.0, max(0.0, words / self.budget - 1.0))
