"""Counts in what the policy wrote: tags, for formats that are defined by their number, and words in any script."""

from __future__ import annotations

import re
from collections.abc import Sequence

from search_r1.llm_agent.transcript import Turn
from search_r1.search.scripts import JOINERS, MARKS, UNSPACED_LETTERS

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and ideographs: written without spaces
_WORD = re.compile(rf"[{_CJK}]|[{UNSPACED_LETTERS}]{{1,4}}|(?:[^\W{_CJK}{UNSPACED_LETTERS}][{MARKS}{JOINERS}]*)+")
_CJK_LETTER = re.compile(rf"[{_CJK}]")


def count(turns: Sequence[Turn], literal: str) -> int:
    """How often the policy wrote a text, such as "<think>"."""
    return sum(turn.text.count(literal) for turn in turns)


def num_pairs(turns: Sequence[Turn], tag: str | None) -> int | None:
    """How often the policy wrote `<tag>`; None if it did not write `</tag>` as often. 0 if `tag` is None."""
    if tag is None:
        return 0
    opened = count(turns, f"<{tag}>")
    return opened if opened == count(turns, f"</{tag}>") else None


def count_words(text: str) -> int:
    """The number of runs of letters with their marks, digits and underscores; each CJK character counts as a word.

    So do up to four characters of another script without spaces, such as Thai.
    """
    return sum(1 for _ in _WORD.finditer(text))


def has_cjk(text: str) -> bool:
    """Whether the text contains a kana or an ideograph."""
    return _CJK_LETTER.search(text) is not None
