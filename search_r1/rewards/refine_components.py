"""What AutoRefine (Shi et al. 2025, arXiv 2505.11277) measures: a policy's notes on what it read, in `<refine>` tags.

The tag means nothing to the environment; it is read here, only from the policy's own text.
"""

from __future__ import annotations

from search_r1.llm_agent.grammar import pairs
from search_r1.rewards.component import component
from search_r1.rewards.metrics import contains_gold
from search_r1.rewards.normalize import normalizer
from search_r1.rewards.reading import Reading
from search_r1.rewards.tags import num_pairs

REFINE = "refine"


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

    def __call__(self, reading: Reading) -> float:
        grammar = reading.grammar
        tags = (grammar.think, grammar.search, REFINE, grammar.answer)
        return float(all(num_pairs(reading.turns, tag) for tag in tags))
