"""Rewards of trajectories, by the rule that the configuration names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from verl.by_name import load_by_name
from verl.config import Config
from verl.errors import ConfigError, RewardUnavailable, RolloutError
from verl.protocol import Status, Trajectory

log = logging.getLogger(__name__)

Score = tuple[float, dict[str, float]]


class Reward(Protocol):
    """A rule: (reward, components) of a trajectory. Its class is made with `reward.kwargs` as keyword arguments.

    Three methods are optional. `from_config(config, **kwargs)`, a classmethod, makes it instead of the constructor.
    `score_all(trajectories, tokenizer)` scores many at once; what could not be scored is a `RewardUnavailable` in its
    place (`score` raises it). `check()` raises a `VerlError` when a service behind the rule does not work.
    """

    def score(self, trajectory: Trajectory, tokenizer: Any) -> Score: ...


class Scorer:
    """The reward of training and that of validation: the same rule, possibly with other arguments.

    `stats` describes the latest `score`: `reward/unavailable_ratio` is the share that could not be scored.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        reward = config.reward
        self.train = make_reward(config, reward.function, reward.kwargs)
        self.validation = self.train
        if reward.val_kwargs is not None:
            self.validation = make_reward(config, reward.function, reward.val_kwargs)
        self.tokenizer = tokenizer
        self.max_failed_ratio = config.agent.max_failed_ratio
        self.stats: dict[str, float] = {}

    def check(self) -> None:
        """Before a run: raises what the `check` of a rule raises, where it has one."""
        for rule in [self.train] if self.validation is self.train else [self.train, self.validation]:
            if hasattr(rule, "check"):
                rule.check()

    def score(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        """Reward every trajectory that did not fail, and return these.

        One whose reward cannot be had becomes FAILED: masked and counted, never scored 0. Raises RolloutError when all
        have failed, or when more than `agent.max_failed_ratio` could not be scored.
        """
        finished = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        scored = score_trajectories(self.validation if validate else self.train, finished, self.tokenizer)
        unavailable = len(finished) - len(scored)
        self.stats = {"reward/unavailable_ratio": unavailable / max(1, len(finished))}
        failure = next((trajectory.failure for trajectory in trajectories if trajectory.status is Status.FAILED), None)
        if not scored:
            raise RolloutError(f"all {len(trajectories)} trajectories failed: {failure}")
        if unavailable:
            log.warning("%d of %d trajectories could not be scored: %s", unavailable, len(finished), failure)
        if unavailable > self.max_failed_ratio * len(finished):
            raise RolloutError(
                f"{unavailable} of {len(finished)} trajectories could not be scored, more than "
                f"agent.max_failed_ratio={self.max_failed_ratio}: {failure}"
            )
        return scored


def make_reward(config: Config, name: str, kwargs: dict[str, Any]) -> Reward:
    """The rule of a dotted name. Raises ConfigError when there is none, or it does not take the arguments."""
    rule = load_by_name(name, "reward.function")
    try:
        reward: Reward = rule.from_config(config, **kwargs) if hasattr(rule, "from_config") else rule(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward.function={name} with {kwargs}: {error}") from error
    return reward


def score_trajectories(rule: Reward, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Trajectory]:
    """Set reward and components of each; returns those that have them, the others are FAILED."""
    for trajectory, score in zip(trajectories, _scores(rule, trajectories, tokenizer), strict=True):
        if isinstance(score, RewardUnavailable):
            trajectory.status, trajectory.failure = Status.FAILED, str(score)
        else:
            trajectory.reward, trajectory.reward_components = score
    return [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]


def _scores(rule: Reward, trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Score | RewardUnavailable]:
    if hasattr(rule, "score_all"):
        scores: list[Score | RewardUnavailable] = rule.score_all(trajectories, tokenizer)
        return scores
    return [_score(rule, trajectory, tokenizer) for trajectory in trajectories]


def _score(rule: Reward, trajectory: Trajectory, tokenizer: Any) -> Score | RewardUnavailable:
    try:
        return rule.score(trajectory, tokenizer)
    except RewardUnavailable as error:
        return error
