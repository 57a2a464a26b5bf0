"""Components that look at the final answer."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.metrics import exact_match
from search_r1.rewards.reading import Reading


@component("has_answer")
class HasAnswer:
    """1 when the policy gave a complete answer."""

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None)


@component("exact_match")
class ExactMatch:
    """1 when the answer equals a gold answer after normalisation."""

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None and exact_match(reading.answer, reading.targets))
