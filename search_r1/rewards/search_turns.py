"""A reward with credit by turn: what a search brought, beside the reward of the answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.component import check_shares
from search_r1.rewards.composite import CompositeReward
from search_r1.rewards.metrics import cover_tokens
from search_r1.rewards.reading import Reading, documents_found, evidence_of, read_trajectory
from verl.errors import ConfigError, DataError, RewardUnavailable
from verl.protocol import IS_SUMMARY, Trajectory, queries_of, searches_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SearchTurnsReward(CompositeReward):
    """The sum of components `weights` for the answer (by default exact match), and for each turn that searches

        gain x (1 in the first turn whose results contain a gold answer, else 0; with gain_for="evidence" the share of
                the row's evidence documents that this turn is the first to find)
        - redundancy x (the share of its passages that an earlier turn of the episode had found)
        - cost x (the number of its queries)

    Turns are credited with `algorithm.adv_estimator=grpo_turns` (or gae, reinforce_plus_plus); others add everything
    up. Components `gain`, `redundancy` and `cost`, summed over the turns and without their weights, are logged.

    After StepSearch (arXiv 2505.15107), which measures the gain by the similarity with gold passages and trains with
    PPO; here the gold answers are enough. An answer such as "two" is contained by chance, so keep `gain` small. Rows
    with `metadata.evidence` name the ids of the documents that the answer follows from.
    """

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        gain: float = 0.1,
        redundancy: float = 0.1,
        cost: float = 0.0,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        clip: Sequence[float] | None = None,
        grammar: Grammar = SEARCH_R1,
        gain_for: str = "answers",
    ) -> None:
        check_shares(gain=gain, redundancy=redundancy, cost=cost)
        if gain_for not in GAINS:
            raise ConfigError(f"gain_for={gain_for!r} is neither {' nor '.join(map(repr, GAINS))}")
        super().__init__({"exact_match": 1.0} if weights is None else weights, options, clip, grammar)
        self.of_turns = {"gain": gain, "redundancy": -redundancy, "cost": -cost}
        self.gain_of = GAINS[gain_for]

    def score_all(self, trajectories: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
        """For each trajectory `{"score", "turns", components}`, or a `RewardUnavailable`."""
        readings = [read_trajectory(trajectory, tokenizer, self.grammar) for trajectory in trajectories]
        scores = self.score_readings(readings)
        return [
            score if isinstance(score, RewardUnavailable) else self._with_turns(*score, trajectory, reading)
            for score, trajectory, reading in zip(scores, trajectories, readings, strict=True)
        ]

    def _with_turns(
        self, number: float, components: Mapping[str, float], trajectory: Trajectory, reading: Reading
    ) -> dict[str, Any]:
        gains = self.gain_of(trajectory, reading)
        measured = {
            turn: {"gain": gains.get(turn, 0.0), **_measure(trajectory, turn)}
            for turn, event in enumerate(trajectory.events)
            if searches_of(event)
        }
        # The credit of a turn has the weights; the sums, which are logged, have not.
        turns = {
            turn: sum(weight * parts[name] for name, weight in self.of_turns.items())
            for turn, parts in measured.items()
        }
        sums = {name: sum(parts[name] for parts in measured.values()) for name in self.of_turns}
        return {**components, **sums, "score": number, "turns": turns}


def _measure(trajectory: Trajectory, turn: int) -> dict[str, float]:
    """`redundancy` and `cost` of a turn that searched, without their weights. A passage without an id is always new."""
    before = {one for event in trajectory.events[:turn] for one in documents_found(event) if one}
    passages = documents_found(trajectory.events[turn])
    return {
        "redundancy": sum(one in before for one in passages) / max(1, len(passages)),
        "cost": float(len(queries_of(trajectory.events[turn]))),
    }


def _gain_for_answers(trajectory: Trajectory, reading: Reading) -> dict[int, float]:
    """1 for the first turn whose results contain a gold answer."""
    numbers = (number for number, event in enumerate(trajectory.events) if not event.get(IS_SUMMARY))
    turns = zip(numbers, reading.turns, strict=False)
    holds = (number for number, turn in turns if cover_tokens(turn.observation, reading.targets))
    return dict.fromkeys(itertools.islice(holds, 1), 1.0)


def _gain_for_evidence(trajectory: Trajectory, reading: Reading) -> dict[int, float]:
    """For each turn the share of the evidence documents that it is the first to find.

    Raises `DataError` for a row that names none.
    """
    missing = set(evidence_of(trajectory.prompt.row))
    if not missing:
        raise DataError(
            f"{trajectory.prompt.data_source}: a row names no evidence documents (metadata.evidence, a list of ids), "
            "which gain_for='evidence' needs"
        )
    number, gains = len(missing), {}
    for turn, event in enumerate(trajectory.events):
        found = missing & set(documents_found(event))
        gains[turn] = len(found) / number
        missing -= found
    return gains


GAINS = {"answers": _gain_for_answers, "evidence": _gain_for_evidence}
"""`gain_for` -> the gain of each turn of a trajectory."""
