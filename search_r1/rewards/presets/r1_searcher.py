"""The rewards of R1-Searcher (Song et al. 2025, arXiv 2503.05592)."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.component import ComponentReward
from search_r1.rewards.r1_searcher_components import (
    R1SearcherAnswerFormat,
    R1SearcherCover,
    R1SearcherF1,
    R1SearcherSearchFormat,
    R1SearcherViolation,
)


class R1SearcherReward(ComponentReward):
    """F1 - `penalty` x violation: for "Qwen zero" with penalty 2, for Llama's second stage with 1 (the paper says 2).

    Published faults: exactly one closed thought is allowed in total, so a policy that thinks in every turn cannot
    search without a violation; Chinese in an answer to a Chinese question is a violation. Not so here.
    """

    def __init__(self, penalty: float = 2.0, grammar: Grammar = SEARCH_R1) -> None:
        if not 0 <= penalty < float("inf"):
            raise ValueError(f"penalty is {penalty}: give a number, 0 or more")
        super().__init__({"r1_searcher_f1": R1SearcherF1(), "r1_searcher_violation": R1SearcherViolation()}, grammar)
        self.penalty = penalty

    def combine(self, values: Mapping[str, float]) -> float:
        return values["r1_searcher_f1"] - self.penalty * values["r1_searcher_violation"]


class R1SearcherStage1Reward(ComponentReward):
    """Llama's first stage, as in its code: +1 or -1 by cover EM, +0.5 for the search format, +0.5 for the answer's.

    The values are -1, -0.5, 0, 1, 1.5 and 2. (The paper describes only the two halves.) Cover EM is on whole words.
    """

    def __init__(self, grammar: Grammar = SEARCH_R1) -> None:
        super().__init__(
            {
                "r1_searcher_cover": R1SearcherCover(),
                "r1_searcher_search_format": R1SearcherSearchFormat(),
                "r1_searcher_answer_format": R1SearcherAnswerFormat(),
            },
            grammar,
        )

    def combine(self, values: Mapping[str, float]) -> float:
        halves = values["r1_searcher_search_format"] + values["r1_searcher_answer_format"]
        return (1.0 if values["r1_searcher_cover"] else -1.0) + 0.5 * halves
