"""Make text from outside fit to be read: without the agent's tags, with whole characters only, a title as text.

Otherwise a passage with `<answer>Paris</answer>` in it would be read as the policy's own answer, and half a surrogate
pair, which JSON may carry and UTF-8 may not, could be neither sent, tokenized nor stored.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

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
    # A tag is complete at a ">", so the text is taken apart there; `kept` is what would remain if it ended here.
    kept = [""]  # each piece after the first starts with "<" or follows a ">"
    *closed, rest = text.split(">")
    for piece in closed:
        _append(kept, piece)
        kept[-1] += ">"
        # Without the tag, what follows is appended to the piece before it, and may complete a tag that was cut in two.
        if tag.fullmatch(kept[-1]):
            kept.pop()
        else:
            kept.append("")
    _append(kept, rest)
    return "".join(kept)


def whole_characters(value: Any) -> Any:
    """A text, or decoded JSON, with U+FFFD for each half of a surrogate pair, in keys as well."""
    if isinstance(value, str):
        return value if _is_whole(value) else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return [whole_characters(item) for item in value] if isinstance(value, list) else value


def _is_whole(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


@lru_cache
def _tag(more: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, sorted({*AGENT_TAGS, *more})))
    # no two runs of white space side by side: there are many ways to share a long one between them
    return re.compile(rf"<\s*(?:/\s*)?(?:{names})\s*(?:/\s*)?>", re.IGNORECASE)


def _append(kept: list[str], piece: str) -> None:
    plain, *opened = piece.split("<")
    kept[-1] += plain
    kept += ["<" + part for part in opened]


def title_of(value: Any) -> str | None:
    """The text of a row's `title`: a number by its digits, None for a missing one (null, NaN) and for what is no title.

    A number may be NumPy's, and 7.0, which pandas makes of 7 in a column with missing values, is "7".
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        return None if not math.isfinite(number) else str(int(number) if number.is_integer() else number)
    return value if isinstance(value, str) else None
