"""Cut a text into passages of about as many words as asked for, at the ends of paragraphs and sentences.

A passage is a piece of the text as it stands. It ends at the end of a paragraph if it is at least half full there, else
at the end of a sentence; only a sentence that is too long by itself is cut at a line, and a line at a word. A Markdown
heading goes with what follows it, and a last passage of less than a quarter of the words joins the one before. So a
passage has at most a quarter more words than asked for.

Where words have no spaces between them, characters are counted: two of Chinese or Japanese, or four of Thai, Lao,
Khmer, Burmese or Tibetan, count as a word. So does each piece of 30 characters of anything else without spaces.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

WORDS = 100
"""Words of a passage, as those of the field's Wikipedia corpus."""

_IDEOGRAPHS = "\u3001-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff"
_SYLLABLES = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]{{1,2}}|[{_SYLLABLES}]{{1,4}}|[^\s{_IDEOGRAPHS}{_SYLLABLES}]{{1,30}}")
_PARAGRAPH = re.compile(r"\n(?:[ \t]*\n)+")
# A dot behind a single letter or digit is an initial or a number in a list. Where no spaces are between words, they are
# between sentences. A run of dots is looked at once, from its first.
_SENTENCE = re.compile(
    rf"""(?<![.!?\u2026])(?<!\b[A-Z0-9])[.!?\u2026]++["'\u201d\u2019)\]]*+\s++(?=[^a-z])"""
    rf"|(?<![\u3002\uff01\uff1f\uff61])[\u3002\uff01\uff1f\uff61]++[\u201d\u2019\u300d\u300f\uff09]*+"
    rf"|(?<=[{_SYLLABLES}])\s++(?=[{_SYLLABLES}])"
)
_LINE = re.compile(r"\n")
_LEVELS = (_SENTENCE, _LINE)
_HEADINGS_AT_END = re.compile(r"(?:^#{1,6} [^\n]*\n\s*)+\Z", re.MULTILINE)


def passages_of(text: str, words: int = WORDS) -> list[str]:
    """The passages in order, without the white space around them. Together they have all words of `text`."""
    ends = [0]
    begin = end = held = 0

    def close(coming: int) -> None:
        """End the passage; headings at its end begin the next one, if what comes fits behind them."""
        nonlocal begin, held
        begin, held, before = end, 0, begin
        headings = _HEADINGS_AT_END.search(text, before, end)
        if headings and headings.start() > before:
            carried = num_words(text, headings.start(), end)
            if carried + coming <= words:
                begin, held = headings.start(), carried
        ends.append(begin)

    for start, stop in _pieces(text, 0, len(text), _PARAGRAPH):
        count = num_words(text, start, stop)
        # A passage that is half full ends before a paragraph that does not fit; else the paragraph fills it up.
        if held + count > words and 2 * held >= words:
            close(0)
        fits = held + count <= words
        for part_end, part_count in [(stop, count)] if fits else _parts(text, start, stop, words):
            if held and held + part_count > words:
                close(part_count)
            end, held = part_end, held + part_count
    # The rest is a passage of its own, or the end of the last one.
    if len(ends) > 1 and 4 * held < words:
        ends.pop()
    ends.append(len(text))
    cut = (text[a:b].strip() for a, b in zip(ends, ends[1:], strict=False))
    return [_PARAGRAPH.sub("\n", passage) for passage in cut if passage]


def num_words(text: str, start: int = 0, stop: int | None = None) -> int:
    """The words between two positions of `text`, counted as this module says."""
    return sum(1 for _ in _WORD.finditer(text, start, len(text) if stop is None else stop))


def _parts(
    text: str, start: int, stop: int, words: int, levels: tuple[re.Pattern[str], ...] = _LEVELS
) -> Iterator[tuple[int, int]]:
    """(end, words) of parts of at most so many words, cut at the first level that is fine enough."""
    if not levels:
        yield from _cut_at_words(text, start, stop, words)
        return
    for begin, end in _pieces(text, start, stop, levels[0]):
        count = num_words(text, begin, end)
        if count <= words:
            yield end, count
        else:
            yield from _parts(text, begin, end, words, levels[1:])


def _cut_at_words(text: str, start: int, stop: int, words: int) -> Iterator[tuple[int, int]]:
    count = 0
    for word in _WORD.finditer(text, start, stop):
        if count == words:
            # An accent or a vowel sign stays with its letter.
            cut = word.start()
            while cut < stop and unicodedata.category(text[cut]).startswith("M"):
                cut += 1
            yield cut, count
            count = 0
        count += 1
    yield stop, count


def _pieces(text: str, start: int, stop: int, end: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """The pieces that end with each match of `end`, and what is left."""
    begin = start
    for match in end.finditer(text, start, stop):
        yield begin, match.end()
        begin = match.end()
    if begin < stop:
        yield begin, stop
