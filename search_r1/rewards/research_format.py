"""The format of ReSearch (Chen et al. 2025, arXiv 2503.19470)."""

from __future__ import annotations

from search_r1.llm_agent.transcript import Reply, Turn
from search_r1.rewards.component import component
from search_r1.rewards.reading import Reading
from search_r1.rewards.tags import count, num_pairs
from verl.protocol import Status


@component("research_format")
class ResearchFormat:
    """1 when all of this holds:

    - thoughts are opened as often as closed, and there is at least one;
    - there is exactly one answer, in `\\boxed{}` if the grammar asks for a box;
    - every search was in a turn of its own and was followed by its results; the policy got no feedback on an error;
    - the trajectory ended with the policy's answer, not at a limit.

    Only the policy's own text is read. Search results that it made up break the format.
    """

    def __call__(self, reading: Reading) -> float:
        turns, grammar = reading.turns, reading.grammar
        return float(
            bool(num_pairs(turns, grammar.think))
            and num_pairs(turns, grammar.answer) == 1
            and reading.answer is not None
            and count(turns, f"<{grammar.information}>") == count(turns, f"</{grammar.information}>") == 0
            and all(_searches_in_order(turn, grammar.search) for turn in turns)
            and reading.status is Status.ANSWERED
        )


def _searches_in_order(turn: Turn, search: str | None) -> bool:
    if turn.reply is Reply.FEEDBACK:
        return False
    return num_pairs([turn], search) == (1 if turn.reply is Reply.OBSERVATION else 0)
