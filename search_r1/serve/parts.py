"""The text of an episode in parts, each of one kind, available while it is being generated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from search_r1.llm_agent.grammar import Grammar

Kind = Literal["think", "search", "information", "call", "result", "answer", "feedback", "text", "summary"]
"""`feedback`: what the policy reads after a turn without an action, or in place of a reply that waits for its
`summary`; `text`: its words outside all blocks. A chat model has `call` and `result` (tool calls, and what the policy
reads of them) in place of `search` and `information`."""


@dataclass(frozen=True)
class Part:
    """A piece of text, tags included.

    Together, the parts of an episode are everything after the prompt, except the headers of chat messages and the
    tokens that end them.
    """

    kind: Kind
    text: str


class TurnSplitter:
    """Splits one policy turn incrementally, as its text arrives.

    A block starts with its opening tag, whether or not it is closed later. As in the grammar's actions, a query or an
    answer may begin inside a thought that stays open; unless `Grammar.tags_in_thoughts`, none begins inside a closed
    one. So from an opening tag in a thought on, everything is held back until the thought is closed or the turn ends.
    From an opening answer tag elsewhere on, too: only the end of the turn shows whether the turn is an answer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._kind: Kind = "text"
        self._waiting = ""  # may be the start of a tag, or begins with the tag of an answer

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after `text`, the next piece of the turn."""
        self._waiting += text
        return merged([*self._blocks(keeps_answer=True, is_over=False)])

    def end(self) -> list[Part]:
        """The rest of a turn that is not an answer."""
        rest = merged([*self._blocks(keeps_answer=False, is_over=True), Part(self._kind, self._waiting)])
        self._waiting = ""
        return rest

    def end_with_answer(self) -> list[Part]:
        """The rest of a turn that is an answer."""
        parts = [*self._blocks(keeps_answer=True, is_over=True)]
        answer, self._waiting = self._waiting, ""
        return merged([*parts, Part("answer", answer)])

    def _blocks(self, keeps_answer: bool, is_over: bool) -> Iterator[Part]:
        while match := re.search("|".join(map(re.escape, self._tags(keeps_answer))), self._waiting):
            # In a thought a tag acts only if the thought stays open, which is known at its end.
            if self._kind == "think" and not self._grammar.tags_in_thoughts:
                closing = f"</{self._grammar.think}>"
                end = self._waiting.find(closing)
                if end >= 0:
                    yield Part("think", self._waiting[: end + len(closing)])
                    self._kind, self._waiting = "text", self._waiting[end + len(closing) :]
                    continue
                if not is_over:
                    yield Part("think", self._waiting[: match.start()])
                    self._waiting = self._waiting[match.start() :]
                    return
            # From an answer's tag on, everything waits for the end of the turn.
            if match.group() == f"<{self._grammar.answer}>":
                yield Part(self._kind, self._waiting[: match.start()])
                self._waiting = self._waiting[match.start() :]
                return
            yield from self._pass_tag(match)
        # No tag is left, but the text may end with the start of one.
        sure = len(self._waiting) - _start_of_tag(self._waiting, self._tags(keeps_answer))
        yield Part(self._kind, self._waiting[:sure])
        self._waiting = self._waiting[sure:]

    def _pass_tag(self, match: re.Match[str]) -> Iterator[Part]:
        """A closing tag ends its block; an opening one begins it, and ends the block around it."""
        closes = match.group().startswith("</")
        end = match.end() if closes else match.start()
        yield Part(self._kind, self._waiting[:end])
        if closes:
            self._kind = "text"
        else:
            self._kind = "think" if match.group() == f"<{self._grammar.think}>" else "search"
            yield Part(self._kind, match.group())
        self._waiting = self._waiting[match.end() :]

    def _tags(self, keeps_answer: bool) -> list[str]:
        """The tags that mean something here."""
        grammar = self._grammar
        searching = [] if grammar.search is None else [f"<{grammar.search}>"]
        by_kind: dict[Kind, list[str]] = {
            "text": [f"<{grammar.think}>", *searching],
            "think": [f"</{grammar.think}>", *searching],
            "search": [f"</{grammar.search}>"],
        }
        return by_kind[self._kind] + ([f"<{grammar.answer}>"] if keeps_answer else [])


def merged(parts: Sequence[Part]) -> list[Part]:
    """`parts` with neighbours of one kind joined, and without empty parts."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].kind == part.kind:
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        elif part.text:
            joined.append(part)
    return joined


def _start_of_tag(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the start of a tag."""
    longest = min(len(text), max(map(len, tags)) - 1)
    return next((n for n in range(longest, 0, -1) if any(tag.startswith(text[-n:]) for tag in tags)), 0)
