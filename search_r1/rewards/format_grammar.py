"""Whether a policy kept the format: think, then search or answer, in every turn.

    trajectory := (think search observation)* think answer
    think := "<think>" text "</think>"
    search := "<search>" text "</search>"
    answer := "<answer>" text "</answer>"

Only white space may stand between blocks. Observations come from the environment: `<information>` in the policy's own
words breaks the format. It is the grammar of Search-R1's format reward, read from turns instead of from a decoded chat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from search_r1.llm_agent.grammar import TAGS


class Reply(Enum):
    """What followed a policy turn; the value reads on after "turn 0: "."""

    NONE = "the end of the turn"
    OBSERVATION = "an observation"
    FEEDBACK = "feedback of the environment"


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn, without control tokens, and the kind of reply it got."""

    text: str
    reply: Reply = Reply.NONE


@dataclass(frozen=True)
class FormatVerdict:
    """`reason` says what broke the format first, and where (turns count from 0); "" when valid."""

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


# Text is never looked up here, so a policy that writes "an observation" has not received one: `Reply` is no `str`.
_NEXT: dict[tuple[_State, str | Reply], _State] = {
    (_State.TURN_START, "<think>"): _State.IN_THINK,
    (_State.IN_THINK, "</think>"): _State.AFTER_THINK,
    (_State.AFTER_THINK, "<search>"): _State.IN_SEARCH,
    (_State.IN_SEARCH, "</search>"): _State.AFTER_SEARCH,
    (_State.AFTER_SEARCH, Reply.OBSERVATION): _State.TURN_START,
    (_State.AFTER_THINK, "<answer>"): _State.IN_ANSWER,
    (_State.IN_ANSWER, "</answer>"): _State.AFTER_ANSWER,
    (_State.AFTER_ANSWER, Reply.NONE): _State.END,
}
_INSIDE_BLOCK = {_State.IN_THINK, _State.IN_SEARCH, _State.IN_ANSWER}
_TAG = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


def check_format(turns: Sequence[Turn]) -> FormatVerdict:
    """Walk through all turns in order. No tag outside `turns[...].text` is ever read."""
    state = _State.TURN_START
    for number, turn in enumerate(turns):
        for symbol in (*_TAG.split(turn.text), turn.reply):
            if _is_allowed_text(symbol, state):
                continue
            following = _NEXT.get((state, symbol))
            if following is None:
                return FormatVerdict(False, f"turn {number}: {_describe(symbol)} where {_expected(state)} should stand")
            state = following
    if state is not _State.END:
        return FormatVerdict(False, f"the trajectory ends where {_expected(state)} should stand")
    return FormatVerdict(True)


def _is_allowed_text(symbol: str | Reply, state: _State) -> bool:
    if isinstance(symbol, Reply) or symbol in TAGS:
        return False
    return state in _INSIDE_BLOCK or not symbol.strip()


def _expected(state: _State) -> str:
    symbols = [symbol for origin, symbol in _NEXT if origin is state]
    return " or ".join(symbol.value if isinstance(symbol, Reply) else symbol for symbol in symbols) or "nothing"


def _describe(symbol: str | Reply) -> str:
    if isinstance(symbol, Reply):
        return symbol.value
    return symbol if symbol in TAGS else f"the text {symbol.strip()[:40]!r}"
