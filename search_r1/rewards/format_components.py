"""Components that look at the form of a trajectory."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.format_grammar import check_format
from search_r1.rewards.normalize import normalize_answer
from search_r1.rewards.reading import Reading


@component("valid_format")
class ValidFormat:
    """1 when every turn kept the format of `search_r1.rewards.format_grammar`."""

    def __call__(self, reading: Reading) -> float:
        return float(check_format(reading.turns, reading.grammar).valid)


@component("retrieval_correct")
class RetrievalCorrect:
    """1 when a gold answer is part of what a search returned, both after `normalize_answer`.

    A gold answer that normalises to nothing (the grade "A") is never found: it would be part of any text.
    """

    def __call__(self, reading: Reading) -> float:
        golds = [gold for gold in map(normalize_answer, reading.targets) if gold]
        return float(any(gold in normalize_answer(passage) for passage in reading.passages for gold in golds))
