"""Strict parsing of a judge's reply: one JSON object with a score from 0 to 1, or an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_END_OF_THOUGHT = "</think>"  # of judges that think aloud before they reply
_SHOWN_CHARS = 200

# The reason comes first: a judge that writes in order then decides after it has said why.
VERDICT_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
            "required": ["reason", "score"],
            "additionalProperties": False,
        },
    },
}


def read_score(reply: str) -> float:
    """The score of the one JSON object in `reply`; prose or a code fence around it is allowed.

    Raises `ValueError` for a reply without a score from 0 to 1, or with two: a judge that quotes the answer it grades
    must not be misread.
    """
    text = reply.rpartition(_END_OF_THOUGHT)[2]
    try:
        found = [value for value in _objects(text) if "score" in value]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON ({error}): {reply[:_SHOWN_CHARS]!r}") from None
    if len(found) != 1:
        raise ValueError(f"the reply has {len(found)} JSON objects with a score, not one: {reply[:_SHOWN_CHARS]!r}")
    score = found[0]["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
        raise ValueError(f"score={score!r} is not a number from 0 to 1"[:_SHOWN_CHARS])
    return float(score)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The outermost JSON objects. A brace that begins none is an error: the object may have been cut."""
    decoder = json.JSONDecoder(object_pairs_hook=_distinct)
    start = text.find("{")
    while start >= 0:
        value, end = decoder.raw_decode(text, start)
        yield value
        start = text.find("{", end)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands in an object twice")
    return found
