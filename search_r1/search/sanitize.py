"""Remove the agent's tags from retrieved text.

Otherwise a passage with `<answer>Paris</answer>` in it would be read as the policy's own answer.
"""

from __future__ import annotations

import re
from functools import lru_cache

AGENT_TAGS = ("answer", "search", "information", "think", "result")


def strip_agent_tags(text: str, more: tuple[str, ...] = ()) -> str:
    """`text` without the agent's tags, including those that form when a tag between two halves is removed.

    The tags are those of the shipped prompt templates, and those of the names in `more`.

    A tag contains no angle brackets, so it can only start at the latest open "<": one pass is enough, however deeply
    tags are nested.
    """
    tag = _tag(more)
    if tag.search(text) is None:
        return text
    kept = [""]  # each piece after the first starts with "<" or follows a ">"
    *closed, rest = text.split(">")
    for piece in closed:
        _append(kept, piece)
        kept[-1] += ">"
        if tag.fullmatch(kept[-1]):
            kept.pop()
        else:
            kept.append("")
    _append(kept, rest)
    return "".join(kept)


@lru_cache
def _tag(more: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, sorted({*AGENT_TAGS, *more})))
    return re.compile(rf"<\s*/?\s*(?:{names})\s*/?\s*>", re.IGNORECASE)


def _append(kept: list[str], piece: str) -> None:
    plain, *opened = piece.split("<")
    kept[-1] += plain
    kept += ["<" + part for part in opened]
