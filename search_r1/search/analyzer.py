"""Text to index terms, the same for passages and queries.

The steps of Lucene's English analyzer: words, lower case, no possessive, no stop words, Porter stems. Accents on Latin
letters are folded in addition, so that "Beyonce" finds the singer.
"""

from __future__ import annotations

import re
import unicodedata

import Stemmer

ANALYZER = "english-porter-1"  # stored with an index; change it whenever the terms change

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_ACCENT = re.compile("[\u0300-\u036f]")
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with
"""  # Lucene's English list
_STOP = frozenset(_STOP_WORDS.split())
_stem = Stemmer.Stemmer("porter").stemWords


def terms(text: str) -> list[str]:
    """The index terms of `text`, in order, repeats kept; empty when it has only stop words or punctuation."""
    words = (word.removesuffix("'s") for word in _WORD.findall(_fold(text).lower()))
    return _stem([word for word in words if word not in _STOP])


def _fold(text: str) -> str:
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKD", text.replace("\u2019", "'"))
    return unicodedata.normalize("NFKC", _ACCENT.sub("", text))
