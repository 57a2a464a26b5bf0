"""Text to index terms, the same for passages and queries.

The steps of Lucene's English analyzer: words, lower case, no possessive, no stop words, Porter stems. In addition,
accents on Latin letters are removed, so that "Beyonce" finds the singer.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import Stemmer

ANALYZER = "english-porter-1"  # stored with an index; change it whenever the terms change

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_ACCENT = re.compile("[\u0300-\u036f]")
_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with
"""  # Lucene's English list
_STOP = frozenset(_STOP_WORDS.split())
_stem = Stemmer.Stemmer("porter", 0).stemWord  # without a cache of its own: _term has one


def terms(text: str) -> list[str]:
    """The index terms of `text`, in order, with repeats; empty if it has only stop words or punctuation."""
    return [term for word in _WORD.findall(_fold(text).lower()) if (term := _term(word)) is not None]


@lru_cache(maxsize=1 << 16)
def _term(word: str) -> str | None:
    """The index term of a lower-case word, None for a stop word; the term of "s" is "".

    The cache is most of the speed: text repeats its words.
    """
    word = word.removesuffix("'s")
    return None if word in _STOP else _stem(word)


def _fold(text: str) -> str:
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKD", text.replace("\u2019", "'"))
    return unicodedata.normalize("NFKC", _ACCENT.sub("", text))
