"""Normalise answers for comparison: as in the SQuAD evaluation (Rajpurkar et al. 2016), and in two other ways."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable

Normalize = Callable[[str], str]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_FOR_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ACCENTS = re.compile(r"[\u0300-\u036f]")
_BOOLEANS = {"true": "yes", "false": "no"}


def normalize_answer(text: str, unicode: bool = False) -> str:
    """Lower case, no ASCII punctuation ("a-b" becomes "ab"), no English articles, single spaces.

    Punctuation and diacritics outside ASCII stay as they are, except with `unicode`: then full-width and other
    compatibility letters become plain ones (NFKC), accents in the block U+0300 to U+036F are removed (an e with an
    acute becomes "e"; letters in their own right, like the Danish o, and the marks of other scripts stay), case is
    folded (a sharp s becomes "ss"), and the punctuation of all scripts is removed.
    """
    plain = _fold(text) if unicode else text.lower().translate(_NO_PUNCTUATION)
    return _without_articles(plain)


def normalize_unicode(text: str) -> str:
    """`normalize_answer` with `unicode`."""
    return normalize_answer(text, unicode=True)


def normalizer(unicode: bool) -> Normalize:
    """The normalisation of an answer component with this option."""
    return normalize_unicode if unicode else normalize_answer


def normalize_r1_searcher(text: str) -> str:
    """R1-Searcher's normalisation: ASCII punctuation becomes a space ("a-b" becomes "b"), true and false yes and no."""
    plain = _without_articles(text.lower().translate(_SPACE_FOR_PUNCTUATION))
    return _BOOLEANS.get(plain, plain)


def _without_articles(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text).split())


def _fold(text: str) -> str:
    # Folding may compose letters again, so they are decomposed before and after.
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    bare = _ACCENTS.sub("", folded).translate(_NO_PUNCTUATION)
    kept = "".join(letter for letter in bare if not unicodedata.category(letter).startswith("P"))
    return unicodedata.normalize("NFC", kept)
