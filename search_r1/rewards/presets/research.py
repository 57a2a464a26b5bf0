"""The reward of ReSearch (Chen et al. 2025, arXiv 2503.19470), and the component for its format."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import Grammar
from search_r1.llm_agent.transcript import Reply
from search_r1.rewards.answer_components import TokenF1
from search_r1.rewards.component import ComponentReward, check_shares, component
from search_r1.rewards.efficiency_components import count, num_pairs
from search_r1.rewards.reading import Reading
from verl.protocol import Status

RESEARCH = Grammar(information="result", boxed=True)
"""The grammar of the template `research`."""


class ResearchReward(ComponentReward):
    """0 when the format (`research_format`) is broken; else the F1 of the answer, but at least `format_score`.

    Published faults: a wrong answer is worth `format_score`, but one with an F1 in (0, `format_score`) only its F1,
    which is less; `monotone=False` reproduces that. And the format is read from the whole chat: search results that the
    policy made up count like real ones, which they never do here. Intended for the template `research`; with another
    template, that one's tags and answer format apply.
    """

    def __init__(self, format_score: float = 0.1, monotone: bool = True, grammar: Grammar = RESEARCH) -> None:
        check_shares(format_score=format_score)
        super().__init__({"f1": TokenF1(), "research_format": ResearchFormat()}, grammar)
        self.format_score, self.monotone = format_score, monotone

    def combine(self, values: Mapping[str, float]) -> float:
        if not values["research_format"]:
            return 0.0
        f1 = values["f1"]
        return max(f1, self.format_score) if self.monotone or f1 == 0 else f1


# The component that the reward is made of besides F1.


@component("research_format")
class ResearchFormat:
    """1 when all of this holds:

    - thoughts are opened as often as closed, and there is at least one;
    - there is exactly one answer, in `\\boxed{}` if the grammar asks for a box;
    - every search was in a turn of its own and was followed by its results; the policy got no feedback on an error;
    - the trajectory ended with the policy's answer, not at a limit.

    Only the policy's own text is read. Search results that it made up break the format.
    """

    reads_search_tags = True

    def __call__(self, reading: Reading) -> float:
        turns, grammar = reading.turns, reading.grammar
        return float(
            bool(num_pairs(turns, grammar.think))
            and num_pairs(turns, grammar.answer) == 1
            and reading.answer is not None
            and count(turns, f"<{grammar.information}>") == count(turns, f"</{grammar.information}>") == 0
            and all(num_pairs([turn], grammar.search) == (turn.reply is Reply.OBSERVATION) for turn in turns)
            and all(turn.reply is not Reply.FEEDBACK for turn in turns)
            and reading.status is Status.ANSWERED
        )
