"""The values that can be overlaid on the tokens of a trajectory, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.protocol import Source

Row = dict[str, Any]
Values = list[float | None]

KNOWN = ("log_probs", "old_log_probs", "gap", "kl", "advantages", "weight_version")
_NOT_VALUES = {"ids", "loss_mask"}


def token_values(row: Row) -> dict[str, Values]:
    """One number per token, None if there is none: what the file has, and what is derived from it.

    `gap` is the trainer's log-prob minus the sampler's. Files of older runs lack the trainer's log-prob, `kl` and
    `advantages` (`verl.tracking.trajectory_columns`). First the `KNOWN` values, then other columns of the file.
    """
    stored = {name: list(value) for name, value in row.items() if name not in _NOT_VALUES and _is_column(value, row)}
    found = stored | {"weight_version": _versions(row)}
    if "log_probs" in stored:
        found["log_probs"] = _where(row["loss_mask"], stored["log_probs"])  # 0 elsewhere, which is no log-prob
        if "old_log_probs" in stored:
            found["gap"] = [_less(*pair) for pair in zip(stored["old_log_probs"], found["log_probs"], strict=True)]
    names = [*(name for name in KNOWN if name in found), *(name for name in found if name not in KNOWN)]
    return {name: found[name] for name in names}


def _is_column(value: Any, row: Row) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(row["ids"])
        and all(one is None or isinstance(one, int | float) for one in value)
    )


def _versions(row: Row) -> Values:
    """Of the weights that sampled a token: those of its segment where they are stored, else the trajectory's."""
    found: Values = []
    for segment in row["segments"]:
        if segment["source"] != Source.POLICY:
            found += [None] * segment["num_tokens"]
            continue
        known = segment.get("weight_versions")
        spans = known or [{"version": row["weight_version"], "num_tokens": segment["num_tokens"]}]
        found += [one["version"] for one in spans for _ in range(one["num_tokens"])]
    return found


def _where(mask: Sequence[bool], values: Values) -> Values:
    return [value if trained else None for trained, value in zip(mask, values, strict=True)]


def _less(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other
