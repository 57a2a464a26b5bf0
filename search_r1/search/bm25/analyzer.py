"""Text to index terms, the same for passages and queries.

The steps of Lucene's English analyzer: words, lower case, no possessive, no stop words, Porter stems. In addition,
accents on Latin and Greek letters are removed, so that "Beyonce" finds the singer. A mark that makes another letter or
syllable is kept: vowel signs and viramas, the voicing of kana, the breve of Cyrillic short i.

A script without spaces between words has a term for each ideograph (Chinese, as in Lucene's standard analyzer) or for
each two neighbouring characters (kana, Hangul, Thai and others), or one character that stands alone. So a sentence has
the terms of the words in it.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

import Stemmer

from search_r1.search.scripts import HANGUL, IDEOGRAPHS, JOINERS, KANA, MARKS, UNSPACED_LETTERS

ANALYZER = "english-porter-2"  # stored with an index; change it whenever the terms change

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with
"""  # Lucene's English list
_STOP = frozenset(_STOP_WORDS.split())
_stem = Stemmer.Stemmer("porter", 0).stemWord  # without a cache of its own: _term has one


def _letters_with_a_mark() -> str:
    """The Cyrillic letters that have a mark, decomposed, as alternatives; not io, written without it, nor a stress."""
    codes = set(range(0x400, 0x530)) - {0x400, 0x401, 0x40D, 0x450, 0x451, 0x45D}
    letters: dict[str, str] = {}
    for pair in (unicodedata.normalize("NFD", chr(code)) for code in sorted(codes)):
        if len(pair) == 2:
            letters[pair[1]] = letters.get(pair[1], "") + pair[0]
    return "|".join(f"[{bases}]{mark}" for mark, bases in letters.items())


_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_ACCENT = re.compile(rf"[\u0300-\u036f](?<!{_letters_with_a_mark()})")
_UNSPACED = KANA + HANGUL + UNSPACED_LETTERS
# All of these classes, and whatever is above U+FFFF: its single ranges would make the search many times slower.
_ABOVE = "\U00010000-\U0010ffff"
_SPECIAL = re.compile(f"[{re.sub(f'[{_ABOVE}]-?', '', IDEOGRAPHS + _UNSPACED + MARKS + JOINERS)}{_ABOVE}]")
# A word with its marks, which follow a letter that is not ASCII; underscores are replaced before.
_MARKED = rf"\w+(?:(?<=[^\x00-\x7f])[{MARKS}{JOINERS}]+\w*)*"
_MARKED_WORD = re.compile(f"{_MARKED}(?:'{_MARKED})*")
_JOINER = re.compile(f"[{JOINERS}]")
_PART = re.compile(f"([{IDEOGRAPHS}][{MARKS}]*)|([{_UNSPACED}]+)|([^{IDEOGRAPHS}{_UNSPACED}]+)")


def terms(text: str) -> list[str]:
    """The index terms of `text`, in order, with repeats; empty if it has only stop words or punctuation."""
    return terms_and_length(text)[0]


def terms_and_length(text: str) -> tuple[list[str], int]:
    """The terms of `text` and its length in words, which BM25 compares with the mean of the corpus.

    The length is the number of runs of letters and digits, without stop words: in English, the number of terms. A
    combining mark ends a run, and a run in a script without spaces counts once, however many terms it has. So the
    lengths and scores of English passages do not depend on how names in other scripts are analysed.
    """
    folded = _fold(text).lower()
    words = [term for word in _WORD.findall(folded) if (term := _term(word)) is not None]
    if folded.isascii() or _SPECIAL.search(folded) is None:
        return words, len(words)
    marked = _MARKED_WORD.findall(folded.replace("_", " "))
    return [term for word in marked for term in _terms_of_word(word)], len(words)


@lru_cache(maxsize=1 << 14)
def _terms_of_word(word: str) -> tuple[str, ...]:
    """The terms of a word in any script, or of what stands between two spaces in a script without them."""
    if word.isascii():
        return () if (term := _term(word)) is None else (term,)
    found: list[str] = []
    for ideograph, unspaced, letters in _PART.findall(_JOINER.sub("", word).removesuffix("'s")):
        if ideograph:
            found.append(ideograph)
        elif unspaced:
            found += map("".join, zip(unspaced, unspaced[1:], strict=False)) if len(unspaced) > 1 else unspaced
        elif (part := letters.strip("'")) and (term := _term(part)) is not None:
            found.append(term)
    return tuple(found)


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
