"""Means of metrics over questions, with 95% intervals.

A share (a score in [0, 1] that is 0 or 1 for every question of a set, such as exact match) has Wilson's score interval
(Wilson 1927): unlike a bootstrap interval, it has a width even if all answers are right, or none is. Over several sets,
the intervals of the shares are combined by the method of variance estimates recovery (Zou and Donner 2008).

Everything else has a percentile bootstrap interval (Efron 1979). Questions are resampled within their set, so the size
of a set is fixed. The macro mean (every set counts the same) and the micro mean (every question counts the same) are
computed from the resampled sets.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 10_000
_DRAWS_AT_ONCE = 4_000_000
WILSON, BOOTSTRAP = "wilson", "bootstrap"


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` questions and the bounds of its `interval`. All are NaN when `count` is 0."""

    mean: float
    low: float
    high: float
    count: int
    interval: str = BOOTSTRAP


def estimates(
    values_by_set: Mapping[str, np.ndarray],
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    scores: Collection[int] = (),
) -> tuple[dict[str, list[Estimate]], list[Estimate], list[Estimate]]:
    """(by set, macro, micro): one estimate per column.

    `values_by_set[name]` is [questions, metrics] float64, NaN where a metric does not apply to a question, which is
    then left out of that metric's mean. A set without any value of a metric is left out of its macro mean. `scores` are
    the columns in [0, 1]; one that is always 0 or 1 is a share.
    """
    # Resample each set with a generator of its own, so that its interval does not depend on which other sets there are.
    sums, counts = {}, {}
    for name, values_NM in values_by_set.items():
        seed_of_set = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        generator = np.random.default_rng([seed, seed_of_set])
        sums[name], counts[name] = _resampled(values_NM, num_resamples, generator)

    # The sets: bootstrap intervals, replaced by Wilson's where a metric is a share.
    drawn = {name: _estimates(sums[name] / _not_zero(counts[name]), counts[name], level) for name in values_by_set}
    by_set = {name: _with_wilson(values_by_set[name], drawn[name], scores, level) for name in values_by_set}
    # Over the sets: a macro mean leaves out the sets in which no question has the metric.
    means_SRM = np.stack([sums[name] / _not_zero(counts[name]) for name in values_by_set])
    total_RM, count_RM = (np.sum(list(parts.values()), axis=0) for parts in (sums, counts))
    with np.errstate(invalid="ignore"):
        present_SRM = ~np.isnan(means_SRM)
        macro_RM = np.where(present_SRM, means_SRM, 0).sum(0) / _not_zero(present_SRM.sum(0))
    macro = _estimates(macro_RM, count_RM, level)
    micro = _estimates(total_RM / _not_zero(count_RM), count_RM, level)
    # Combine Wilson's intervals where all sets have them: a macro mean weighs sets alike, a micro mean by questions.
    of_sets = list(zip(*by_set.values(), strict=True))
    return (
        by_set,
        [_over_sets(found, parts, [1] * len(parts)) for found, parts in zip(macro, of_sets, strict=True)],
        [_over_sets(found, parts, [part.count for part in parts]) for found, parts in zip(micro, of_sets, strict=True)],
    )


def wilson(mean: float, count: int, level: float) -> Estimate:
    """The score interval of a share `mean` of `count` questions."""
    square = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    middle = mean + square / (2 * count)
    half = math.sqrt(square * (mean * (1 - mean) / count + square / (4 * count**2)))
    low, high = ((middle + side * half) / (1 + square / count) for side in (-1, 1))
    # exactly the bound where it is one: rounding would leave 1 - 1e-16
    return Estimate(mean, 0.0 if mean == 0 else low, 1.0 if mean == 1 else high, count, WILSON)


def permutation_p(difference_N: np.ndarray, num_draws: int = 100_000, seed: int = 0) -> float:
    """The two-sided p-value of paired differences [N]: the share of draws in which their sum, each with a random sign,
    is as far from 0 as it is. The sample itself is counted as a draw, so p is never 0.
    """
    changed_N = difference_N[difference_N != 0]
    least = abs(changed_N.sum()) * (1 - 1e-9)  # sums in another order round otherwise
    generator = np.random.default_rng(seed)
    as_far, done, at_once = 0, 0, max(1, _DRAWS_AT_ONCE // max(1, len(changed_N)))
    while done < num_draws:
        size = min(at_once, num_draws - done)
        signs = 2.0 * generator.integers(0, 2, (size, len(changed_N))) - 1
        as_far += int((np.abs(signs @ changed_N) >= least).sum())
        done += size
    return (1 + as_far) / (1 + num_draws)


def _with_wilson(
    values_NM: np.ndarray, found: Sequence[Estimate], scores: Collection[int], level: float
) -> list[Estimate]:
    """`found`, with the interval of Wilson for the columns that are shares."""
    are_shares_M = ((values_NM == 0) | (values_NM == 1) | np.isnan(values_NM)).all(0)
    return [
        wilson(estimate.mean, estimate.count, level)
        if estimate.count and column in scores and are_shares_M[column]
        else estimate
        for column, estimate in enumerate(found)
    ]


def _over_sets(found: Estimate, of_sets: Sequence[Estimate], weights: Sequence[int]) -> Estimate:
    """`found`, a weighted mean of sets that are drawn independently, with their intervals where all are of shares."""
    parts = [(part, weight) for part, weight in zip(of_sets, weights, strict=True) if part.count]
    if not parts or any(part.interval != WILSON for part, _ in parts):
        return found
    total = sum(weight for _, weight in parts)
    below = math.hypot(*(weight / total * (part.mean - part.low) for part, weight in parts))
    above = math.hypot(*(weight / total * (part.high - part.mean) for part, weight in parts))
    return replace(found, low=found.mean - below, high=found.mean + above, interval=WILSON)


def _resampled(values_NM: np.ndarray, num_resamples: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sums [1 + resamples, metrics] and how many values are in them; row 0 is the sample itself."""
    number = len(values_NM)
    if number == 0:
        nothing = np.zeros((1 + num_resamples, values_NM.shape[1]))
        return nothing, nothing
    # A sample is a count of how often each question was drawn; many are multiplied with the values at once.
    present_NM = ~np.isnan(values_NM)
    columns = np.concatenate([np.where(present_NM, values_NM, 0), present_NM], axis=1)
    rows = [columns.sum(0, keepdims=True)]
    done, at_once = 0, max(1, _DRAWS_AT_ONCE // number)
    while done < num_resamples:
        size = min(at_once, num_resamples - done)
        drawn = generator.integers(0, number, (size, number)) + number * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * number).reshape(size, number)
        rows.append(times.astype(np.float64) @ columns)
        done += size
    sums, counts = np.split(np.concatenate(rows), 2, axis=1)
    return sums, counts


def _estimates(means_RM: np.ndarray, count_RM: np.ndarray, level: float) -> list[Estimate]:
    tail = 50 * (1 - level)
    found = []
    for means_R, count in zip(means_RM.T, count_RM[0], strict=True):
        drawn = means_R[1:][~np.isnan(means_R[1:])]
        low, high = np.percentile(drawn, [tail, 100 - tail]) if count else (np.nan, np.nan)
        found.append(Estimate(float(means_R[0]), float(low), float(high), int(count)))
    return found


def _not_zero(counts: np.ndarray) -> np.ndarray:
    return np.where(counts == 0, np.nan, counts)


# Calibration: whether what is said with confidence p is right in a share p of the cases.

CALIBRATION_BIN = 100
"""Answers of a bin, in the order of their confidence; the last bin also has what is left."""


def calibration(confidences: Sequence[float], right: Sequence[float]) -> dict[str, float | int | None]:
    """The root mean square calibration error over bins of equal size (Hendrycks, Mazeika and Dietterich 2019).

    Both have a number from 0 to 1 for each answer. `error` is the root of the mean, over answers, of the squared
    distance between a bin's mean confidence and its share of right answers. BrowseComp-Plus, and BrowseComp before it,
    report the same without the bin of the highest confidences, which their loop leaves out although it stays in the
    denominator: `error_as_published`, None where there is one bin only.
    """
    # Sorted, so that a bin has answers of like confidence; the last bin also has those that fill no bin.
    order = np.argsort(np.asarray(confidences), kind="stable")
    confidence_N = np.asarray(confidences, np.float64)[order]
    right_N = np.asarray(right, np.float64)[order]
    num_bins = max(1, len(order) // CALIBRATION_BIN)
    bounds = [*(CALIBRATION_BIN * number for number in range(num_bins)), len(order)]
    terms = [
        (end - start) / len(order) * (confidence_N[start:end].mean() - right_N[start:end].mean()) ** 2
        for start, end in itertools.pairwise(bounds)
    ]
    return {
        "answers": len(order),
        "confidence": float(confidence_N.mean()),
        "right": float(right_N.mean()),
        "error": math.sqrt(sum(terms)),
        "error_as_published": math.sqrt(sum(terms[:-1])) if num_bins > 1 else None,
    }
