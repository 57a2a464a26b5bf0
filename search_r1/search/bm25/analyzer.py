"""Text to index terms, the same for passages and queries.

The steps of Lucene's English analyzer: words, lower case, no possessive, no stop words, Porter stems. In addition,
accents on Latin and Greek letters are removed, so that "Beyonce" finds the singer. A mark that makes another letter or
syllable is kept: vowel signs and viramas, the voicing of kana, the breve of Cyrillic short i.

A script without spaces between words has a term for each ideograph (Chinese, as in Lucene's standard analyzer) or for
each two neighbouring characters (kana, Hangul, Thai and others). A sentence has all terms of every word in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby

import Stemmer

ANALYZER = "english-porter-2"  # stored with an index; change it whenever the terms change

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this
    to was will with
"""  # Lucene's English list
_STOP = frozenset(_STOP_WORDS.split())
_stem = Stemmer.Stemmer("porter", 0).stemWord  # without a cache of its own: _term has one

# Blocks of Unicode: the scripts of a block stay, whatever characters are added to them.
_IDEOGRAPHS = (
    "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han
    "\U00020000-\U0003ffff\U00017000-\U00018d8f\U0001b170-\U0001b2ff"  # Han; Tangut, Khitan; Nushu
    "\U00012000-\U0001254f\U00013000-\U0001467f"  # cuneiform, hieroglyphs
)
_UNSPACED = (
    "\u3031-\u3035\u3040-\u30ff\u31f0-\u31ff\U0001aff0-\U0001b16f"  # Hiragana, Katakana
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff\u3100-\u312f\u31a0-\u31bf\ua000-\ua4cf"  # Hangul, Bopomofo, Yi
    "\u0e00-\u0eff\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf\U00011700-\U0001174f"  # the Tai scripts: Le, Lue, Tham, Viet, Ahom
    "\u1a00-\u1a1f\u1b00-\u1b7f\u1bc0-\u1bff\ua930-\uaa5f"  # Buginese, Balinese, Batak; Rejang, Javanese, Cham
    "\U00011ee0-\U00011eff\U00011f00-\U00011f5f"  # Makasar, Kawi
)
_JOINERS = "\u200c\u200d\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"  # and selectors of a glyph


def _marks() -> str:
    """The combining marks of letters, as ranges of a character class: none of symbols, none that is a joiner."""
    letters = (*range(0x300, 0x20D0), *range(0x2100, 0xFE00), *range(0xFE20, 0x1F000))
    marks = [code for code in letters if unicodedata.category(chr(code))[0] == "M"]
    runs = [[code for _, code in run] for _, run in groupby(enumerate(marks), lambda item: item[1] - item[0])]
    return "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)


def _letters_with_a_mark() -> str:
    """The Cyrillic letters that have a mark, decomposed, as alternatives; not io, written without it, nor a stress."""
    codes = set(range(0x400, 0x530)) - {0x400, 0x401, 0x40D, 0x450, 0x451, 0x45D}
    pairs = (unicodedata.normalize("NFD", chr(code)) for code in sorted(codes))
    return "|".join(pair for pair in pairs if len(pair) == 2)


_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_ACCENT = re.compile(rf"[\u0300-\u036f](?<!{_letters_with_a_mark()})")
_MARKS = _marks()
# All of these classes, and whatever is above U+FFFF: its single ranges would make the search many times slower.
_ABOVE = "\U00010000-\U0010ffff"
_SPECIAL = re.compile(f"[{re.sub(f'[{_ABOVE}]-?', '', _IDEOGRAPHS + _UNSPACED + _MARKS + _JOINERS)}{_ABOVE}]")
# A word with its marks, which follow a letter that is not ASCII; underscores are replaced before.
_MARKED = rf"\w+(?:(?<=[^\x00-\x7f])[{_MARKS}{_JOINERS}]+\w*)*"
_MARKED_WORD = re.compile(f"{_MARKED}(?:'{_MARKED})*")
_JOINER = re.compile(f"[{_JOINERS}]")
_PART = re.compile(f"([{_IDEOGRAPHS}][{_MARKS}]*)|([{_UNSPACED}]+)|([^{_IDEOGRAPHS}{_UNSPACED}]+)")


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


def _terms_of_word(word: str) -> Iterator[str]:
    """The terms of a word in any script, or of what stands between two spaces in a script without them."""
    if word.isascii():
        if (term := _term(word)) is not None:
            yield term
        return
    for ideograph, unspaced, letters in _PART.findall(_JOINER.sub("", word).removesuffix("'s")):
        if ideograph:
            yield ideograph
        elif len(unspaced) == 1:
            yield unspaced
        elif unspaced:
            yield from map("".join, zip(unspaced, unspaced[1:], strict=False))
        elif (part := letters.strip("'")) and (term := _term(part)) is not None:
            yield term


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
