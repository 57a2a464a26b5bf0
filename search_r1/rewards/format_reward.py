"""Exact match plus credit for following the format: the format reward of Search-R1 v0.3 (`qa_em_format`).

The components for the format stand beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.answer_components import ExactMatch, HasAnswer
from search_r1.rewards.coefficients import check_shares
from search_r1.rewards.component import BatchedComponent, Component, ComponentReward, component
from search_r1.rewards.format_grammar import check_format
from search_r1.rewards.metrics import contains_gold
from search_r1.rewards.normalize import normalizer
from search_r1.rewards.reading import Reading


class FormatReward(ComponentReward):
    """The table, with s = `structure_format_score`, f = `final_format_score`, r = `retrieval_score`:

    | answer  | format kept                  | format broken |
    |---------|------------------------------|---------------|
    | correct | 1                            | 1 - s         |
    | wrong   | s, or s + r                  | f             |
    | none    | s, or s + r (cannot happen)  | 0             |

    r is added when a retrieved passage contains a gold answer. Only the policy's own text counts as an answer, never an
    example in the prompt. With all three 0, the reward is exact match. Raises `ValueError` for scores outside [0, 1],
    and for s + r > 1: a wrong answer would be worth more than a correct one.
    """

    def __init__(
        self,
        structure_format_score: float = 0.0,
        final_format_score: float = 0.0,
        retrieval_score: float = 0.0,
        grammar: Grammar = SEARCH_R1,
    ) -> None:
        # No wrong answer may be worth more than a correct one.
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
        # All components are logged, also those of which the scores are 0.
        components: dict[str, Component | BatchedComponent] = {
            "exact_match": ExactMatch(),
            "has_answer": HasAnswer(),
            "valid_format": ValidFormat(),
            "retrieval_correct": RetrievalCorrect(),
        }
        super().__init__(components, grammar)
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
    """1 when every turn follows the format of `search_r1.rewards.format_grammar`."""

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
