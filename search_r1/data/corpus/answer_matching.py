"""Find which of many gold answers a text contains, in one pass over its words, and which titles of passages it names.

Text and answers are normalised as in the QA metric (`normalize_answer`) and split at white space into tokens. A text
contains an answer if the answer's tokens occur there in a row: "art" is in "The Art, of war" but not in "party". As the
metric deletes ASCII punctuation, "Paris-based" is the token "parisbased" and does not contain the answer "Paris".

In Chinese, Japanese, Korean, Thai and other scripts in which a word may follow another without a space, each character
with its marks is a token. Punctuation next to them is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from search_r1.rewards.metrics import normalize_answer
from search_r1.search.corpus import parse_passage, title_and_text
from search_r1.search.jsonl import read_lines
from search_r1.search.scripts import HANGUL, IDEOGRAPHS, JOINERS, KANA, MARKS, UNSPACED_LETTERS

AnswerTokens = tuple[str, ...]

_END = ""  # no token is empty
_UNSPACED = IDEOGRAPHS + KANA + HANGUL + UNSPACED_LETTERS
_ANY_UNSPACED = re.compile(f"[{_UNSPACED}]")
_CHARACTER = re.compile(rf"[{_UNSPACED}][{MARKS}{JOINERS}]*|(?:[^\W{_UNSPACED}][{MARKS}{JOINERS}]*)+")


def answer_tokens(text: str) -> AnswerTokens:
    """The normalised tokens of a passage or an answer; empty if there is nothing but articles and punctuation."""
    tokens = normalize_answer(text).split()
    if text.isascii() or not _ANY_UNSPACED.search(text):
        return tuple(tokens)
    parts = (_CHARACTER.findall(token) if _ANY_UNSPACED.search(token) else [token] for token in tokens)
    return tuple(chain.from_iterable(parts))


class AnswerMatcher:
    """A trie of answers by their tokens. An answer without tokens is never found."""

    def __init__(self, answers: Iterable[AnswerTokens]) -> None:
        self._root: dict[str, Any] = {}
        for answer in answers:
            node = self._root
            for token in answer:
                node = node.setdefault(token, {})
            node[_END] = answer

    def find(self, tokens: Sequence[str]) -> set[AnswerTokens]:
        """The answers that the text with these tokens contains."""
        found: set[AnswerTokens] = set()
        for start, token in enumerate(tokens):
            node = self._root.get(token)
            following = start + 1
            while node is not None:
                if _END in node:
                    found.add(node[_END])
                node = node.get(tokens[following]) if following < len(tokens) else None
                following += 1
        return found


def spaced(tokens: AnswerTokens) -> str:
    """The tokens with a space around each, so that one text is in another only on token boundaries."""
    return f" {' '.join(tokens)} "


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
