"""The result of a reward, read as a number with components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

Score = tuple[float, dict[str, float]]
"""The reward, and what it was made of."""


class ScoreOfTurns(NamedTuple):
    """A score with the rewards that single turns have beside it, by turn from 0."""

    number: float
    components: dict[str, float]
    turns: dict[int, float]


def read_score(result: Any) -> ScoreOfTurns:
    """The score in a number, in (number, components), or in a mapping with `score` whose other numbers are components
    and whose `turns`, {number of the turn from 0: number}, are rewards of single turns.

    Raises `ValueError`, which says what is wrong, for anything else and for NaN and infinity.
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"gave {result!r}, a mapping without 'score'")
        others = {name: value for name, value in result.items() if name != "score" and _as_number(value) is not None}
        return ScoreOfTurns(
            read_number(result["score"]), _read_components(others), _read_turns(result.get("turns") or {})
        )
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], Mapping):
            raise ValueError(f"gave {result!r}, which is not (number, components)")
        return ScoreOfTurns(read_number(result[0]), _read_components(result[1]), {})
    return ScoreOfTurns(read_number(result), {}, {})


def read_number(result: Any) -> float:
    """A number of Python, NumPy or torch, or a tensor with one element, as a float; -0 is 0. Raises `ValueError`."""
    number = _as_number(result)
    if number is None or not math.isfinite(number):
        raise ValueError(f"gave {result!r}, which is no finite number")
    return number + 0.0


def _read_components(components: Mapping[Any, Any]) -> dict[str, float]:
    try:
        return {str(name): read_number(value) for name, value in components.items()}
    except ValueError as error:
        raise ValueError(f"{error}, in its components {components!r}") from error


def _read_turns(turns: Any) -> dict[int, float]:
    if not isinstance(turns, Mapping) or not all(type(turn) is int and turn >= 0 for turn in turns):
        raise ValueError(f"gave the turns {turns!r}, which are not {{number of the turn, from 0: reward}}")
    try:
        return {turn: read_number(value) for turn, value in turns.items()}
    except ValueError as error:
        raise ValueError(f"{error}, in its turns {turns!r}") from error


def _as_number(value: Any) -> float | None:
    """`value` as a float; None if it is no number."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # several elements
            return None
    return float(value) if isinstance(value, Real) else None
