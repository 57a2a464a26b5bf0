"""Split the text of a trajectory into parts of one kind, and again around gold answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from search_r1.llm_agent.grammar import Grammar
from search_r1.serve.parts import Part, TurnSplitter, merged
from verl.protocol import Source

Run = tuple[str, bool]  # a text, and whether it is a gold answer
_BETWEEN = r"[^\w]{1,4}"  # words of an answer
_DOCUMENT = re.compile(r"(?=Doc \d+\(Title: )")
_TITLE = re.compile(r'Doc \d+\(Title: "?(.*?)"?\) ?', re.DOTALL)


@dataclass(frozen=True)
class Passage:
    """`id`, `score`: None if they were not stored."""

    title: str
    text: str
    id: str | None = None
    score: float | None = None


class GoldFinder:
    """Finds gold answers in a text: their words in a row, ignoring case and punctuation between them."""

    def __init__(self, gold: Sequence[str]) -> None:
        patterns = [pattern for answer in gold if (pattern := _pattern(answer))]
        self._any = re.compile("|".join(sorted(patterns, key=len, reverse=True)), re.IGNORECASE) if patterns else None

    def runs(self, text: str) -> list[Run]:
        """`text` split into pieces that are gold answers and pieces that are not."""
        return list(self._runs(text))

    def found_in(self, text: str) -> bool:
        return self._any is not None and self._any.search(text) is not None

    def _runs(self, text: str) -> Iterator[Run]:
        end = 0
        for match in self._any.finditer(text) if self._any else ():
            if match.start() > end:
                yield text[end : match.start()], False
            yield match.group(), True
            end = match.end()
        if end < len(text):
            yield text[end:], False


def split_segment(source: str, text: str, event: dict[str, Any] | None, grammar: Grammar) -> list[Part]:
    """Parts with the kinds of `search_r1.serve.parts`; for a reply, `event` is that of the turn before it."""
    if source == Source.PROMPT:
        return merged([Part("text", text)])
    if source == Source.ENVIRONMENT:
        searched = event is not None and event.get("query") is not None and event.get("executed") is not False
        return merged([Part("information" if searched else "feedback", text)])
    splitter = TurnSplitter(grammar)
    parts = splitter.feed(text)
    answers = grammar.parse_action(text).kind == "answer"
    return merged([*parts, *(splitter.end_with_answer() if answers else splitter.end())])


def token_ranges(parts: Sequence[Part], texts: Sequence[str]) -> list[tuple[int, int]]:
    """For each part, its first token and the one after its last; a token belongs to the part in which it begins."""
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    ranges, token, end = [], 0, 0
    for number, part in enumerate(parts):
        end += len(part.text)
        first = token
        while token < len(starts) and (starts[token] < end or number == len(parts) - 1):
            token += 1
        ranges.append((first, token))
    return ranges


def passages_of(event: dict[str, Any], grammar: Grammar) -> list[Passage]:
    """The passages shown after a search, with ids and scores if they were stored."""
    text = grammar.unwrap_information(str(event.get("observation") or ""))
    shown = [piece for piece in _DOCUMENT.split(text) if piece.strip()]
    ids, scores = _list(event.get("document_ids")), _list(event.get("scores"))
    if ids and not shown:
        shown = [""] * len(ids)
    return [_passage(piece, _at(ids, place), _at(scores, place)) for place, piece in enumerate(shown)]


def _passage(text: str, document_id: Any, score: Any) -> Passage:
    match = _TITLE.match(text)
    title, body = (match.group(1), text[match.end() :]) if match else ("", text)
    number = float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None
    return Passage(title, body.rstrip("\n"), None if document_id in (None, "") else str(document_id), number)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _at(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _pattern(answer: str) -> str | None:
    """None for an answer without a letter or digit, which stands everywhere."""
    words = re.findall(r"\w+", answer)
    return r"(?<!\w)" + _BETWEEN.join(map(re.escape, words)) + r"(?!\w)" if words else None
