"""Exact match of the policy's answer with any of the gold answers (spec name: `qa_em`)."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.answer_components import ExactMatch, HasAnswer
from search_r1.rewards.component import ComponentReward


class ExactMatchReward(ComponentReward):
    """1 for an exact match, `wrong_answer_score` for any other complete answer, 0 without an answer.

    Raises `ValueError` if a wrong answer were worth more than a correct one.
    """

    def __init__(self, wrong_answer_score: float = 0.0, grammar: Grammar = SEARCH_R1) -> None:
        if not wrong_answer_score <= 1.0:
            raise ValueError(
                f"the score of a wrong answer is {wrong_answer_score}: give 1, that of a correct one, or less"
            )
        super().__init__({"exact_match": ExactMatch(), "has_answer": HasAnswer()}, grammar)
        self.wrong_answer_score = wrong_answer_score

    def combine(self, values: Mapping[str, float]) -> float:
        return 1.0 if values["exact_match"] else self.wrong_answer_score * values["has_answer"]
