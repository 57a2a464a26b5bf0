"""Components for the format of a trajectory."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.format_grammar import check_format
from search_r1.rewards.metrics import contains_gold
from search_r1.rewards.normalize import normalizer
from search_r1.rewards.reading import Reading


@component("valid_format")
class ValidFormat:
    """1 when every turn follows the format of `search_r1.rewards.format_grammar`."""

    def __call__(self, reading: Reading) -> float:
        return float(check_format(reading.turns, reading.grammar).valid)


@component("retrieval_correct")
class RetrievalCorrect:
    """1 when a gold answer is part of what a search returned, both after normalisation.

    A gold answer that normalises to nothing (the grade "A") is never found: it would be part of any text.
    """

    def __init__(self, unicode: bool = False) -> None:
        self.normalize = normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        return float(contains_gold(reading.passages, reading.targets, self.normalize))
