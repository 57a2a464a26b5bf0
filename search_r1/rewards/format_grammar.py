"""Whether a policy followed the format: think, then search or answer, in every turn.

    trajectory := (think search observation)* think answer
    think := "<think>" text "</think>"
    search := "<search>" text "</search>"
    answer := "<answer>" text "</answer>"

Only white space is allowed between blocks. A tag that is only named in a thought opens nothing (see `Grammar.acting`),
but breaks the format, as published. Observations come from the environment: `<information>` in the policy's own words
breaks the format. The tag names are those of the prompt template. It is the grammar of Search-R1's format reward,
read from turns instead of from a decoded chat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.transcript import Reply, Turn


@dataclass(frozen=True)
class FormatVerdict:
    """`reason` says what first broke the format, and where (turns count from 0); "" if valid."""

    valid: bool
    reason: str = ""


class _State(Enum):
    TURN_START = auto()
    IN_THINK = auto()
    AFTER_THINK = auto()
    IN_SEARCH = auto()
    AFTER_SEARCH = auto()
    IN_ANSWER = auto()
    AFTER_ANSWER = auto()
    END = auto()


_INSIDE_BLOCK = {_State.IN_THINK, _State.IN_SEARCH, _State.IN_ANSWER}


class _Automaton:
    """The walk through the turns of one grammar. With a grammar without search, no search can be made."""

    def __init__(self, grammar: Grammar) -> None:
        # Text is never looked up here: a policy that writes "an observation" has not received one, `Reply` is no `str`.
        self.next: dict[tuple[_State, str | Reply], _State] = {
            (_State.TURN_START, f"<{grammar.think}>"): _State.IN_THINK,
            (_State.IN_THINK, f"</{grammar.think}>"): _State.AFTER_THINK,
            (_State.AFTER_THINK, f"<{grammar.search}>"): _State.IN_SEARCH,
            (_State.IN_SEARCH, f"</{grammar.search}>"): _State.AFTER_SEARCH,
            (_State.AFTER_SEARCH, Reply.OBSERVATION): _State.TURN_START,
            (_State.AFTER_THINK, f"<{grammar.answer}>"): _State.IN_ANSWER,
            (_State.IN_ANSWER, f"</{grammar.answer}>"): _State.AFTER_ANSWER,
            (_State.AFTER_ANSWER, Reply.NONE): _State.END,
        }
        if grammar.search is None:
            self.next = {edge: to for edge, to in self.next.items() if _State.IN_SEARCH not in (edge[0], to)}
        self.tags = set(grammar.tags)
        self.tag = re.compile("(" + "|".join(map(re.escape, grammar.tags)) + ")")

    def allows_text(self, symbol: str | Reply, state: _State) -> bool:
        if isinstance(symbol, Reply) or symbol in self.tags:
            return False
        return state in _INSIDE_BLOCK or not symbol.strip()

    def expected(self, state: _State) -> str:
        symbols = [symbol for origin, symbol in self.next if origin is state]
        return " or ".join(symbol.value if isinstance(symbol, Reply) else symbol for symbol in symbols) or "nothing"

    def describe(self, symbol: str | Reply) -> str:
        if isinstance(symbol, Reply):
            return symbol.value
        return symbol if symbol in self.tags else f"the text {symbol.strip()[:40]!r}"


_automaton = lru_cache(_Automaton)


def check_format(turns: Sequence[Turn], grammar: Grammar = SEARCH_R1) -> FormatVerdict:
    """Check all turns in order. Tags outside of `turns[...].text` are never read."""
    walk, state = _automaton(grammar), _State.TURN_START
    for number, turn in enumerate(turns):
        for symbol in (*walk.tag.split(turn.text), turn.reply):
            if walk.allows_text(symbol, state):
                continue
            following = walk.next.get((state, symbol))
            if following is None:
                reason = f"turn {number}: {walk.describe(symbol)} where {walk.expected(state)} should stand"
                return FormatVerdict(False, reason)
            state = following
    if state is not _State.END:
        return FormatVerdict(False, f"the trajectory ends where {walk.expected(state)} should stand")
    return FormatVerdict(True)
