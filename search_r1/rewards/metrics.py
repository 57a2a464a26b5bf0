"""How well an answer fits the gold answers: the metrics of open-domain question answering."""

from __future__ import annotations

from collections.abc import Sequence

from search_r1.rewards.normalize import normalize_answer


def exact_match(prediction: str, targets: Sequence[str]) -> bool:
    """Whether a target equals the prediction after `normalize_answer`.

    A target that normalises to nothing (the grade "A", "The The") is compared by its letters alone instead, so that an
    empty prediction does not match it.
    """
    return any(_same(prediction, target) for target in targets)


def _same(prediction: str, target: str) -> bool:
    normalized = normalize_answer(target)
    if normalized:
        return normalize_answer(prediction) == normalized
    return bool(target.strip()) and prediction.strip().lower() == target.strip().lower()
