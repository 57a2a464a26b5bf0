"""Exact match plus credit for following the format: the format reward of Search-R1 v0.3 (`qa_em_format`), with its
components.

The format is to think, then to search or answer, in every turn:

    trajectory := (think search observation)* think answer
    think := "<think>" text "</think>"
    search := "<search>" text "</search>"
    answer := "<answer>" text "</answer>"

Only white space is allowed between blocks. A tag that is only named in a thought opens nothing (see `Grammar.acting`),
but breaks the format, as published. Observations come from the environment: `<information>` in the policy's own words
breaks the format. The tag names are those of the prompt template. It is the grammar of Search-R1's format reward, read
from turns instead of from a decoded chat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.transcript import Reply, Turn
from search_r1.rewards.answer_components import ExactMatch, HasAnswer
from search_r1.rewards.component import BatchedComponent, Component, ComponentReward, check_shares, component
from search_r1.rewards.metrics import contains_gold, normalizer
from search_r1.rewards.reading import Reading


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
        # The tags of the turn and the texts between them, in order (`split` keeps the group), then the reply to it.
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


class FormatReward(ComponentReward):
    """The table, with s = `structure_format_score`, f = `final_format_score`, r = `retrieval_score`:

    | answer  | format kept                  | format broken |
    |---------|------------------------------|---------------|
    | correct | 1                            | 1 - s         |
    | wrong   | s, or s + r                  | f             |
    | none    | s, or s + r (cannot happen)  | 0             |

    r is added when a retrieved passage contains a gold answer. Only the policy's own text counts as an answer, never an
    example in the prompt. With all three 0, the reward is exact match. Raises `ValueError` for scores outside [0, 1],
    and for s + r > 1 or s + f > 1: a wrong answer would be worth more than a correct one in the same format.
    """

    def __init__(
        self,
        structure_format_score: float = 0.0,
        final_format_score: float = 0.0,
        retrieval_score: float = 0.0,
        grammar: Grammar = SEARCH_R1,
    ) -> None:
        check_shares(
            structure_format_score=structure_format_score,
            final_format_score=final_format_score,
            retrieval_score=retrieval_score,
        )
        if structure_format_score + retrieval_score > 1.0:
            raise ValueError(
                f"structure_format_score {structure_format_score} + retrieval_score {retrieval_score} is above 1, "
                f"the reward of a correct answer: lower one of them"
            )
        if structure_format_score + final_format_score > 1.0:
            raise ValueError(
                f"structure_format_score {structure_format_score} + final_format_score {final_format_score} is over 1, "
                "and a wrong answer in a broken format worth more than a correct one: lower one of them"
            )
        # All components are logged, also those of which the scores are 0.
        components: dict[str, Component | BatchedComponent] = {
            "exact_match": ExactMatch(),
            "has_answer": HasAnswer(),
            "valid_format": ValidFormat(),
            "retrieval_correct": RetrievalCorrect(),
        }
        super().__init__(components, grammar)
        if structure_format_score == final_format_score == retrieval_score == 0:
            self.logged_only = frozenset(components) - {"exact_match"}
        self.structure_format_score = structure_format_score
        self.final_format_score = final_format_score
        self.retrieval_score = retrieval_score

    def combine(self, values: Mapping[str, float]) -> float:
        """`retrieval_correct` counts only if the format is kept."""
        if values["exact_match"]:
            return 1.0 if values["valid_format"] else 1.0 - self.structure_format_score
        if values["valid_format"]:
            return self.structure_format_score + self.retrieval_score * values["retrieval_correct"]
        return self.final_format_score * values["has_answer"]


# The components for the format of a trajectory.


@component("valid_format")
class ValidFormat:
    """1 when every turn follows the format of `search_r1.rewards.format_reward`."""

    reads_search_tags = True

    def __call__(self, reading: Reading) -> float:
        return float(check_format(reading.turns, reading.grammar).valid)


@component("retrieval_correct")
class RetrievalCorrect:
    """1 when a gold answer is part of what a search returned, both after normalisation.

    A gold answer that normalises to nothing (the grade "A") is never found: it would be part of any text.
    """

    def __init__(self, unicode: bool = False) -> None:
        self.normalize = normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        return float(contains_gold(reading.passages, reading.targets, self.normalize))
