"""Counting words in any script."""

from __future__ import annotations

import re

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and ideographs: written without spaces
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_CJK_LETTER = re.compile(rf"[{_CJK}]")


def count_words(text: str) -> int:
    """The number of runs of letters, digits and underscores; each CJK character counts as a word."""
    return sum(1 for _ in _WORD.finditer(text))


def has_cjk(text: str) -> bool:
    """Whether the text contains a kana or an ideograph."""
    return _CJK_LETTER.search(text) is not None
