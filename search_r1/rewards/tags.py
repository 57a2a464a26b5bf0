"""Count tags in the policy's turns, for formats that are defined by the number of tags."""

from __future__ import annotations

from collections.abc import Sequence

from search_r1.llm_agent.transcript import Turn


def count(turns: Sequence[Turn], literal: str) -> int:
    """How often the policy wrote a text, such as "<think>"."""
    return sum(turn.text.count(literal) for turn in turns)


def num_pairs(turns: Sequence[Turn], tag: str | None) -> int | None:
    """How often the policy wrote `<tag>`; None if it did not write `</tag>` as often. 0 if `tag` is None."""
    if tag is None:
        return 0
    opened = count(turns, f"<{tag}>")
    return opened if opened == count(turns, f"</{tag}>") else None
