"""Find which of many gold answers a text contains, in one pass over its words.

Text and answers are normalised as in the QA metric (`normalize_answer`) and split at white space into tokens. A text
contains an answer if the answer's tokens occur there in a row: "art" is in "The Art, of war" but not in "party". As the
metric deletes ASCII punctuation, "Paris-based" is the token "parisbased" and does not contain the answer "Paris".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from search_r1.rewards.normalize import normalize_answer

AnswerTokens = tuple[str, ...]

_END = ""  # no token is empty


def answer_tokens(text: str) -> AnswerTokens:
    """The normalised tokens of a passage or an answer; empty if there is nothing but articles and punctuation."""
    return tuple(normalize_answer(text).split())


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
