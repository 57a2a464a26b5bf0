"""The reward of ReSearch (Chen et al. 2025, arXiv 2503.19470)."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import Grammar
from search_r1.rewards.answer_components import TokenF1
from search_r1.rewards.coefficients import check_shares
from search_r1.rewards.component import ComponentReward
from search_r1.rewards.research_format import ResearchFormat

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
