"""Answers made comparable: the normalisation of the SQuAD evaluation (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation ("a-b" becomes "ab"), no English articles, single spaces.

    Punctuation and diacritics outside ASCII stay as they are.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
