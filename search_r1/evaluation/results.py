"""Summarise records: means with intervals, by set and over all sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from search_r1.evaluation.records import METRICS, SCORES, Record
from search_r1.evaluation.statistics import NUM_RESAMPLES, Estimate, estimates


def summarize(records: Sequence[Record], seed: int = 0) -> dict[str, Any]:
    """`questions` and `failed` counts, `sets`, `macro` and `micro`, for JSON.

    Failed questions are counted, but are in no mean. A metric that applies to no question is left out.
    """
    by_set: dict[str, list[Record]] = {}
    for record in records:
        by_set.setdefault(record.set_name, []).append(record)
    values = {name: _values(rows) for name, rows in by_set.items()}
    sets, macro, micro = estimates(values, seed=seed, scores=[list(METRICS).index(name) for name in SCORES])
    return {
        "resamples": NUM_RESAMPLES,
        **_counts(records),
        "sets": {name: _counts(rows) | {"metrics": _metrics(sets[name])} for name, rows in by_set.items()},
        "macro": _metrics(macro),
        "micro": _metrics(micro),
    }


def _counts(records: Sequence[Record]) -> dict[str, int]:
    return {"questions": len(records), "failed": sum(record.failed for record in records)}


def _values(records: Sequence[Record]) -> np.ndarray:
    """[finished questions, metrics] float64; None is NaN."""
    rows = [[record.metrics.get(name) for name in METRICS] for record in records if not record.failed]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(METRICS))


def _metrics(found: Sequence[Estimate]) -> dict[str, dict[str, Any]]:
    return {name: asdict(estimate) for name, estimate in zip(METRICS, found, strict=True) if estimate.count}
