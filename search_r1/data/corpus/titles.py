"""Titles of passages, and where a text names them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from search_r1.data.corpus.answer_matching import answer_tokens, spaced
from search_r1.search.corpus import parse_passage, title_and_text
from search_r1.search.jsonl import read_lines

_WORD = re.compile(r"\w+")


def names(text: str, title: str) -> bool:
    """Whether the words of a title stand in the text in a row; a part in brackets at its end may be missing."""
    short = answer_tokens(without_brackets(title)) or answer_tokens(title)
    return spaced(short) in spaced(answer_tokens(text))


def without_brackets(title: str) -> str:
    """A title without the part in brackets at its end, as in "Emma (novel)"."""
    return re.sub(r"(?<!\s)\s*\([^()]*\)$", "", title)  # a run of white space is tried from its beginning only


class CorpusTitles:
    """All titles of a corpus, by their words."""

    def __init__(self, titles: Iterable[str]) -> None:
        self._titles: dict[tuple[str, ...], dict[str, None]] = {}
        self._longest: dict[str, int] = {}
        """Words of the longest title that begins with a word."""
        for title in titles:
            words = tuple(_WORD.findall(without_brackets(title)))
            if len("".join(words)) > 1:
                self._titles.setdefault(words, {})[title] = None
                self._longest[words[0]] = max(self._longest.get(words[0], 0), len(words))

    @classmethod
    def read(cls, corpus: Path) -> CorpusTitles:
        """Those of a `.jsonl` or `.jsonl.gz` file. Raises `CorpusError` naming file and line."""
        passages = (parse_passage(line, corpus, number) for number, line in read_lines(corpus))
        return cls(title_and_text(passage["contents"])[0] for passage in passages)

    def named_in(self, text: str) -> list[str]:
        """The titles that the text names, in its order and its upper and lower case; each once.

        Of titles that overlap in the text the longer one counts. "Emma" names "Emma (novel)" and "Emma (film)", too.
        """
        words, found, at = _WORD.findall(text), dict[str, None](), 0
        while at < len(words):
            lengths = range(self._longest.get(words[at], 0), 0, -1)
            length = next((n for n in lengths if tuple(words[at : at + n]) in self._titles), 0)
            found |= self._titles.get(tuple(words[at : at + length]), {})
            at += max(length, 1)
        return list(found)
