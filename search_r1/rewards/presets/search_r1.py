"""The rewards of Search-R1 (Jin et al. 2025): v0.2 (arXiv 2503.09516) and v0.3 (arXiv 2505.15117)."""

from __future__ import annotations

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.rewards.format_reward import FormatReward


class SearchR1V02Reward(ExactMatchReward):
    """1 for an exact match of the last answer, `format_score` for another answer, 0 without one.

    Published faults: answers are searched in the whole chat. A page with `<answer>Paris</answer>` in it answers for the
    policy; the example in the prompt answers for a policy that gives no answer; and because the example is expected, a
    prompt without one always scores 0 (at least two answers must be found). Here only the policy's own answers count,
    and one is enough.
    """

    def __init__(self, format_score: float = 0.0, grammar: Grammar = SEARCH_R1) -> None:
        super().__init__(wrong_answer_score=format_score, grammar=grammar)


class SearchR1V03Reward(FormatReward):
    """The format reward with the coefficients of the published scripts: s = 0.2, f = 0.1, r = 0.

    Published faults: those of v0.2, so that a trajectory without an answer gets f; the format can be kept only by
    ChatML models; and a control token at the end, or a truncated observation, breaks it. Here the author of each turn
    is known, and any chat template works.
    """

    def __init__(
        self,
        structure_format_score: float = 0.2,
        final_format_score: float = 0.1,
        retrieval_score: float = 0.0,
        grammar: Grammar = SEARCH_R1,
    ) -> None:
        super().__init__(structure_format_score, final_format_score, retrieval_score, grammar)
