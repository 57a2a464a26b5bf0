"""Rewards of trajectories, by the rule that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.by_name import load_by_name
from verl.config import RewardConfig
from verl.errors import RolloutError
from verl.protocol import Status, Trajectory


class Scorer:
    """The reward of training and that of validation: the same class, possibly with other arguments."""

    def __init__(self, config: RewardConfig, tokenizer: Any) -> None:
        reward_class = load_by_name(config.function, "reward.function")
        self.train = reward_class(**config.kwargs)
        self.validation = self.train if config.val_kwargs is None else reward_class(**config.val_kwargs)
        self.tokenizer = tokenizer

    def score(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        """Reward every trajectory that did not fail, and return these. Raises RolloutError when all have failed."""
        usable = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        if not usable:
            raise RolloutError(f"all {len(trajectories)} trajectories failed: {trajectories[0].failure}")
        rule = self.validation if validate else self.train
        for trajectory in usable:
            trajectory.reward, trajectory.reward_components = rule.score(trajectory, self.tokenizer)
        return usable
