"""Means of metrics over questions, with bootstrap intervals (Efron 1979, percentile method).

Questions are drawn again within their set, so the size of a set is fixed. A set's mean is resampled by itself; the
macro mean (every set counts the same) and the micro mean (every question counts the same) are those of resampled sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

NUM_RESAMPLES = 10_000
_DRAWS_AT_ONCE = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` questions and the bounds of its interval. All are NaN when `count` is 0."""

    mean: float
    low: float
    high: float
    count: int


def estimates(
    values_by_set: Mapping[str, np.ndarray],
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> tuple[dict[str, list[Estimate]], list[Estimate], list[Estimate]]:
    """(by set, macro, micro): one estimate for each column.

    `values_by_set[name]` is [questions, metrics] float64, NaN where a metric does not apply to a question: it is left
    out of that metric's mean. A set without any value of a metric is left out of its macro mean.
    """
    sums, counts = {}, {}
    for name, values_NM in values_by_set.items():
        sums[name], counts[name] = _resampled(values_NM, num_resamples, _generator(name, seed))
    by_set = {name: _estimates(sums[name] / _not_zero(counts[name]), counts[name], level) for name in values_by_set}
    means_SRM = np.stack([sums[name] / _not_zero(counts[name]) for name in values_by_set])
    total_RM, count_RM = (np.sum(list(parts.values()), axis=0) for parts in (sums, counts))
    with np.errstate(invalid="ignore"):
        present_SRM = ~np.isnan(means_SRM)
        macro_RM = np.where(present_SRM, means_SRM, 0).sum(0) / _not_zero(present_SRM.sum(0))
    return by_set, _estimates(macro_RM, count_RM, level), _estimates(total_RM / _not_zero(count_RM), count_RM, level)


def _resampled(values_NM: np.ndarray, num_resamples: int, generator: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sums [1 + resamples, metrics] and how many values are in them; row 0 is the sample itself."""
    number = len(values_NM)
    if number == 0:
        nothing = np.zeros((1 + num_resamples, values_NM.shape[1]))
        return nothing, nothing
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


def _generator(name: str, seed: int) -> np.random.Generator:
    """A set's own: its interval does not depend on which other sets there are."""
    return np.random.default_rng([seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])])
