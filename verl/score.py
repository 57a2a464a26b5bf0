"""What a reward gave, read as a number with components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

Score = tuple[float, dict[str, float]]
"""The reward, and what it was made of."""


def read_score(given: Any) -> Score:
    """Of a number, of (number, components), or of a mapping with `score` whose other numbers are the components.

    Raises `ValueError`, which says what is wrong, for anything else and for NaN and infinity.
    """
    if isinstance(given, Mapping):
        if "score" not in given:
            raise ValueError(f"gave {given!r}, a mapping without 'score'")
        others = {name: value for name, value in given.items() if name != "score" and _as_number(value) is not None}
        return read_number(given["score"]), _read_components(others)
    if isinstance(given, tuple):
        if len(given) != 2 or not isinstance(given[1], Mapping):
            raise ValueError(f"gave {given!r}, which is not (number, components)")
        return read_number(given[0]), _read_components(given[1])
    return read_number(given), {}


def read_number(given: Any) -> float:
    """Of a number of Python, of NumPy or of torch, also as a tensor with one element. Raises `ValueError`."""
    number = _as_number(given)
    if number is None or not math.isfinite(number):
        raise ValueError(f"gave {given!r}, which is no finite number")
    return number


def _read_components(components: Mapping[Any, Any]) -> dict[str, float]:
    try:
        return {str(name): read_number(value) for name, value in components.items()}
    except ValueError as error:
        raise ValueError(f"{error}, in its components {components!r}") from error


def _as_number(value: Any) -> float | None:
    """None when it is no number."""
    if not isinstance(value, Real) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # several elements
            return None
    return float(value) if isinstance(value, Real) else None
