"""The rewards of R1-Searcher (Song et al. 2025, arXiv 2503.05592), and the components that they are made of.

Its own prompt has one thought that spans all searches; our prompts have one in every turn. "One closed thought" is
therefore required in the answering turn, and at most one in each other turn: the same for its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.llm_agent.transcript import Reply
from search_r1.rewards.component import ComponentReward, component
from search_r1.rewards.efficiency_components import count, has_cjk, num_pairs
from search_r1.rewards.metrics import cover_tokens, normalize_r1_searcher, token_f1
from search_r1.rewards.reading import Reading

MAX_ANSWER_WORDS = 10


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


# The components, on the tags of any grammar.


@component("r1_searcher_f1")
class R1SearcherF1:
    """F1 of the answer with R1-Searcher's normalisation, in [0, 1]; 0 without an answer."""

    def __call__(self, reading: Reading) -> float:
        return 0.0 if reading.answer is None else token_f1(reading.answer, reading.targets, normalize_r1_searcher)


@component("r1_searcher_cover")
class R1SearcherCover:
    """1 when the answer contains the words of a gold answer in a row, with R1-Searcher's normalisation."""

    def __call__(self, reading: Reading) -> float:
        answer = reading.answer
        return float(answer is not None and cover_tokens(answer, reading.targets, normalize_r1_searcher))


@component("r1_searcher_violation")
class R1SearcherViolation:
    """1 when any of these holds:

    - a tag is not closed as often as opened, or the policy wrote a tag of the environment;
    - thoughts are not closed as described above, or there is not exactly one answer, or it has more than 10 words;
    - the policy wrote Chinese or Japanese letters though the question has none;
    - it wrote "Assistant", the start of a chat turn.
    """

    def __call__(self, reading: Reading) -> float:
        answer = reading.answer
        kept = (
            searches_well_formed(reading)
            and thought_and_answer_well_formed(reading)
            and answer is not None
            and len(answer.split()) <= MAX_ANSWER_WORDS
            and not count(reading.turns, "Assistant")
            and (has_cjk(reading.question) or not any(has_cjk(turn.text) for turn in reading.turns))
        )
        return float(not kept)


@component("r1_searcher_search_format")
class R1SearcherSearchFormat:
    """1 when there was a search, and each one was well-formed and was followed by its results."""

    reads_search_tags = True

    def __call__(self, reading: Reading) -> float:
        searches = num_pairs(reading.turns, reading.grammar.search)
        found = sum(turn.reply is Reply.OBSERVATION for turn in reading.turns)
        return float(searches_well_formed(reading) and searches == found > 0)


@component("r1_searcher_answer_format")
class R1SearcherAnswerFormat:
    """1 when thought and answer are well-formed."""

    def __call__(self, reading: Reading) -> float:
        return float(thought_and_answer_well_formed(reading))


def searches_well_formed(reading: Reading) -> bool:
    """Search tags are closed as often as opened, and the policy wrote no tag of the environment."""
    turns, information = reading.turns, reading.grammar.information
    own = count(turns, f"<{information}>") + count(turns, f"</{information}>")
    return num_pairs(turns, reading.grammar.search) is not None and not own


def thought_and_answer_well_formed(reading: Reading) -> bool:
    """Thoughts are closed as often as opened, once in the last turn, at most once in others; there is one answer."""
    turns, grammar = reading.turns, reading.grammar
    closed = [count([turn], f"</{grammar.think}>") for turn in turns]
    return (
        num_pairs(turns, grammar.think) is not None
        and max(closed, default=0) == 1 == closed[-1]
        and num_pairs(turns, grammar.answer) == 1
    )
