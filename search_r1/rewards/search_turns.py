"""A reward with credit by turn: what a search brought, beside the reward of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from search_r1.llm_agent.grammar import SEARCH_R1, Grammar
from search_r1.rewards.component import check_shares
from search_r1.rewards.composite import CompositeReward
from search_r1.rewards.metrics import cover_tokens
from search_r1.rewards.reading import Reading, read_trajectory
from verl.errors import RewardUnavailable
from verl.protocol import Trajectory, searches_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SearchTurnsReward(CompositeReward):
    """The sum of components `weights` for the answer (by default exact match), and for each turn that searches

        gain x (1 in the first turn whose results contain a gold answer, else 0)
        - redundancy x (the share of its passages that an earlier turn of the episode had found)
        - cost x (the number of its searches)

    Turns are credited with `algorithm.adv_estimator=grpo_turns` (or gae, reinforce_plus_plus); others add everything
    up. Components `gain`, `redundancy` and `cost`, summed over the turns and without their weights, are logged.

    After StepSearch (arXiv 2505.15107), which measures the gain by the similarity with gold passages and trains with
    PPO; here the gold answers are enough. An answer such as "two" is contained by chance, so keep `gain` small.
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
    ) -> None:
        check_shares(gain=gain, redundancy=redundancy, cost=cost)
        super().__init__({"exact_match": 1.0} if weights is None else weights, options, clip, grammar)
        self.of_turns = {"gain": gain, "redundancy": -redundancy, "cost": -cost}

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
        measured = {
            turn: _measure(trajectory, reading, turn)
            for turn, event in enumerate(trajectory.events)
            if searches_of(event)
        }
        turns = {
            turn: sum(weight * parts[name] for name, weight in self.of_turns.items())
            for turn, parts in measured.items()
        }
        sums = {name: sum(parts[name] for parts in measured.values()) for name in self.of_turns}
        return {**components, **sums, "score": number, "turns": turns}


def _measure(trajectory: Trajectory, reading: Reading, turn: int) -> dict[str, float]:
    """`gain`, `redundancy` and `cost` of a turn that searched, without their weights."""
    searches = searches_of(trajectory.events[turn])
    earlier = [search for event in trajectory.events[:turn] for search in searches_of(event)]
    before = {one for search in earlier for one in _passages_of(search)}
    passages = [one for search in searches for one in _passages_of(search)]
    holds = [cover_tokens(one.observation, reading.targets) for one in reading.turns[: turn + 1]]
    return {
        "gain": float(holds[-1] and not any(holds[:-1])),
        "redundancy": sum(one in before for one in passages) / max(1, len(passages)),
        "cost": float(len(searches)),
    }


def _passages_of(search: Mapping[str, Any]) -> list[str]:
    return [str(one) for one in search.get("document_ids") or ()]
