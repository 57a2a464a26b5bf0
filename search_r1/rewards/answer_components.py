"""Components for the final answer. With `unicode` they compare by `normalize_answer(unicode=True)`."""

from __future__ import annotations

from search_r1.rewards.component import component
from search_r1.rewards.metrics import cover_bag, cover_match, cover_tokens, exact_match, normalizer, token_f1
from search_r1.rewards.reading import Reading

_COVERS = {"text": cover_match, "tokens": cover_tokens, "bag": cover_bag}


@component("has_answer")
class HasAnswer:
    """1 when the policy gave a complete answer."""

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None)


@component("exact_match")
class ExactMatch:
    """1 when the answer equals a gold answer after normalisation."""

    def __init__(self, unicode: bool = False) -> None:
        self.normalize = normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None and exact_match(reading.answer, reading.targets, self.normalize))


@component("cover_match")
class CoverMatch:
    """1 when the answer contains a gold answer after normalisation.

    `by` "text": anywhere (cover EM as published); "tokens": as whole words in a row; "bag": as words in any order. A
    long answer covers more than a short one: without a length limit, a policy learns to list candidates.
    """

    def __init__(self, by: str = "text", unicode: bool = False) -> None:
        if by not in _COVERS:
            raise ValueError(f"by is {by!r}: give one of {', '.join(_COVERS)}")
        self.covers, self.normalize = _COVERS[by], normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None and self.covers(reading.answer, reading.targets, self.normalize))


@component("f1")
class TokenF1:
    """F1 between the words of the answer and those of the closest gold answer, in [0, 1]; 0 without an answer."""

    def __init__(self, unicode: bool = False) -> None:
        self.normalize = normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        return 0.0 if reading.answer is None else token_f1(reading.answer, reading.targets, self.normalize)
