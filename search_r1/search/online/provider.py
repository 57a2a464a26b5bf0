"""What an online engine is: how a question is put to it, and how its answer is read. Both are pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Fields = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One web result. `score` is the engine's own (higher is better), None when it gives only an order."""

    title: str
    url: str
    text: str
    score: float | None = None


@dataclass(frozen=True)
class Provider:
    """One engine.

    `build(query, num_results)` gives the fields of a request without its API key: URL parameters of a GET, the JSON
    body of a POST. `parse(answer)` reads the decoded JSON of an HTTP 200, best first, and raises `ValueError` when it
    does not have the documented shape. `per_second` and `concurrency` are what a small plan allows.
    """

    name: str
    endpoint: str
    method: Literal["GET", "POST"]
    build: Callable[[str, int], Fields]
    parse: Callable[[Any], list[Result]]
    max_results: int
    key_variable: str
    key_place: Literal["header", "parameter"]
    key_name: str
    key_prefix: str = ""
    needs: tuple[str, ...] = ()
    per_second: float = 1.0
    concurrency: int = 8


def read_results(items: Any, url: str, text: Callable[[Fields], str], score: str | None = None) -> list[Result]:
    """The results in a list of objects; `url` and `score` name their keys. One without an address is left out.

    Raises `ValueError` for anything but a list of objects with text in their fields.
    """
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the results are not a list of objects")
    return [
        Result(text_of(item, "title"), text_of(item, url), text(item), _number(item.get(score)))
        for item in items
        if text_of(item, url)
    ]


def text_of(item: Fields, name: str) -> str:
    """A text field; "" when it is absent or null. Raises `ValueError` when it is something else."""
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name!r} of a result is a {type(value).__name__}, not a string")
    return value or ""


def object_of(answer: Any) -> Fields:
    """`answer`, when it is a JSON object. Raises `ValueError`."""
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is a {type(answer).__name__}, not an object")
    return answer


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
