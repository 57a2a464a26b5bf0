"""The characters of scripts by how their words are told apart: the insides of character classes for `re`.

Blocks of Unicode, not only the characters that are assigned today. The marks are those of this Python's Unicode.
"""

from __future__ import annotations

import unicodedata
from itertools import groupby

IDEOGRAPHS = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003ffff\U00017000-\U00018d8f\U0001b170-\U0001b2ff"  # Han; Tangut, Khitan; Nushu
    "\U00012000-\U0001254f\U00013000-\U0001467f"  # cuneiform, hieroglyphs
)
KANA = "\u3031-\u3035\u3040-\u30ff\u31f0-\u31ff\U0001aff0-\U0001b16f\u3100-\u312f\u31a0-\u31bf\ua000-\ua4cf"
"""Hiragana and Katakana, and the other syllables that are written like them: Bopomofo and Yi."""

HANGUL = "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff"
"""Korean has spaces, but a particle follows its word without one."""

UNSPACED_LETTERS = (
    "\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf\U00011700-\U0001174f"  # Tai Le, New Tai Lue, Tai Tham, Tai Viet, Ahom
    "\u1a00-\u1a1f\u1b00-\u1b7f\u1bc0-\u1bff\ua930-\uaa5f"  # Buginese, Balinese, Batak; Rejang, Javanese, Cham
    "\U00011ee0-\U00011eff\U00011f00-\U00011f5f"  # Makasar, Kawi
)
"""Letters with marks, of scripts without spaces between words."""

JOINERS = "\u200c\u200d\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
"""What is inside a word and cannot be seen: joiners and non-joiners of letters, selectors of one of their glyphs."""


def _marks() -> str:
    letters = (*range(0x300, 0x20D0), *range(0x2100, 0xFE00), *range(0xFE20, 0x1F000))
    marks = [code for code in letters if unicodedata.category(chr(code))[0] == "M"]
    runs = [[code for _, code in run] for _, run in groupby(enumerate(marks), lambda item: item[1] - item[0])]
    return "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


MARKS = _marks()
"""The combining marks of letters (vowel signs, viramas, accents), which regular expressions do not count as `\\w`."""
