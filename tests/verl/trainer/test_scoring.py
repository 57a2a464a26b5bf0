"""Rewards: one by one or many at once; what cannot be scored is masked and counted, never a 0."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.errors import ConfigError, RewardUnavailable, RolloutError
from verl.protocol import Prompt, Status, Trajectory
from verl.trainer.scoring import Scorer


class Length:
    """Rewards the number of turns; it is down for those of 13."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def score(self, trajectory, tokenizer):
        if trajectory.num_turns == 13:
            raise RewardUnavailable("down")
        return self.factor * trajectory.num_turns, {"turns": float(trajectory.num_turns)}


class AtOnce(Length):
    calls = 0

    def score_all(self, trajectories, tokenizer):
        AtOnce.calls += 1
        return [RewardUnavailable("down") if t.num_turns == 13 else self.score(t, tokenizer) for t in trajectories]


class Configured(Length):
    @classmethod
    def from_config(cls, config, factor):
        return cls(factor * config.max_turns)


def scorer(rule: type, *overrides: str) -> Scorer:
    return Scorer(load_config("ppo_trainer", [f"reward.function={__name__}.{rule.__name__}", *overrides]), None)


def episodes(*turns: int) -> list[Trajectory]:
    return [Trajectory("g", Prompt((1,), "t", {}), status=Status.ANSWERED, num_turns=n) for n in turns]


@pytest.mark.parametrize("rule", [Length, AtOnce])
def test_what_cannot_be_scored_fails_and_has_no_reward(rule):
    trajectories = episodes(2, 13, 3, 4, 5)
    trajectories[3].status = Status.FAILED
    found = scorer(rule, "agent.max_failed_ratio=0.25")
    assert found.score(trajectories) == [trajectories[0], trajectories[2], trajectories[4]]
    assert [t.reward for t in trajectories] == [2.0, None, 3.0, None, 5.0]
    assert trajectories[1].status is Status.FAILED and trajectories[1].failure == "down"
    assert found.stats == {"reward/unavailable_ratio": 0.25}  # of those that came from the rollouts in order


def test_many_are_scored_by_one_call():
    AtOnce.calls = 0
    scorer(AtOnce).score(episodes(1, 2, 3))
    assert AtOnce.calls == 1


def test_too_many_without_a_reward_stop_the_run():
    with pytest.raises(RolloutError, match="1 of 3 .*max_failed_ratio=0.3: down"):
        scorer(Length, "agent.max_failed_ratio=0.3").score(episodes(1, 13, 2))
    with pytest.raises(RolloutError, match="all 2 trajectories failed: down"):
        scorer(Length, "agent.max_failed_ratio=1").score(episodes(13, 13))


def test_arguments_of_training_and_validation():
    found = scorer(Length, "reward.kwargs={factor: 2.0}", "reward.val_kwargs={factor: 3.0}")
    assert [t.reward for t in found.score(episodes(4))] == [8.0]
    assert [t.reward for t in found.score(episodes(4), validate=True)] == [12.0]


def test_a_rule_may_read_the_config():
    found = scorer(Configured, "reward.kwargs={factor: 2.0}", "max_turns=5")
    assert [t.reward for t in found.score(episodes(1))] == [10.0]


def test_arguments_it_does_not_take():
    with pytest.raises(ConfigError, match="no_such"):
        scorer(Length, "reward.kwargs={no_such: 1}")
