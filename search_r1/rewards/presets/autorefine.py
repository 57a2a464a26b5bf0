"""The reward of AutoRefine (Shi et al. 2025, arXiv 2505.11277), and the components for its notes."""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import Grammar, pairs
from search_r1.rewards.answer_components import HasAnswer
from search_r1.rewards.component import ComponentReward, check_shares, component, make_component
from search_r1.rewards.efficiency_components import num_pairs
from search_r1.rewards.metrics import contains_gold, normalizer
from search_r1.rewards.reading import Reading

AUTOREFINE = Grammar(information="documents")
"""The grammar of the template `autorefine`."""
METRICS = ("f1", "exact_match", "cover_match")
REFINE = "refine"


class AutoRefineReward(ComponentReward):
    """a, the `metric` of the answer, or `format_score` x V + `refine_score` x R if that is more; 0 without an answer.

    V is `refine_format`, R is `refine_correct`: a gold answer is in the policy's `<refine>` tags. Published fault: the
    second part counts only if a is exactly 0, so that an F1 of 0.05 can be worth less than 0; `monotone=False`
    reproduces that. A policy can list candidates in its notes for R; keep `refine_score` low. Intended for the template
    `autorefine`.
    """

    def __init__(
        self,
        metric: str = "f1",
        format_score: float = 0.0,
        refine_score: float = 0.1,
        monotone: bool = True,
        grammar: Grammar = AUTOREFINE,
    ) -> None:
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}: give one of {', '.join(METRICS)}")
        check_shares(**{"format_score": format_score, "refine_score": refine_score})
        check_shares(**{"format_score + refine_score": format_score + refine_score})
        components = {
            metric: make_component(metric),
            "has_answer": HasAnswer(),
            "refine_correct": RefineCorrect(),
            "refine_format": RefineFormat(),
        }
        super().__init__(components, grammar)
        if format_score == 0:
            self.logged_only = frozenset({"refine_format"})
        self.metric, self.monotone = metric, monotone
        self.format_score, self.refine_score = format_score, refine_score

    def combine(self, values: Mapping[str, float]) -> float:
        if not values["has_answer"]:
            return 0.0
        a = values[self.metric]
        if a and not self.monotone:
            return a
        partial = self.format_score * values["refine_format"] + self.refine_score * values["refine_correct"]
        return max(a, partial)


# The components on a policy's notes about what it read, in `<refine>` tags. The tag means nothing to the environment.
# It is read here, only from the policy's own text.


@component("refine_correct")
class RefineCorrect:
    """1 when the policy's `<refine>` tags contain a gold answer, both after normalisation."""

    def __init__(self, unicode: bool = False) -> None:
        self.normalize = normalizer(unicode)

    def __call__(self, reading: Reading) -> float:
        texts = [(turn.text, reading.grammar.acting(turn.text, REFINE)) for turn in reading.turns]
        notes = [text[note.inner : note.inner_end] for text, acting in texts for note in pairs(acting, REFINE)]
        return float(contains_gold([" ".join(notes)], reading.targets, self.normalize))


@component("refine_format")
class RefineFormat:
    """1 when the policy wrote each of think, search, refine and answer at least once, and closed each as often."""

    reads_search_tags = True

    def __call__(self, reading: Reading) -> float:
        grammar = reading.grammar
        tags = (grammar.think, grammar.search, REFINE, grammar.answer)
        return float(all(num_pairs(reading.turns, tag) for tag in tags))
