"""Which trajectories a step trains on: rounds of dynamic sampling, and the greedy baselines of remax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.config import Config, load_config
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.collection import Collector


def make_config(*overrides: str) -> Config:
    required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
    small = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n_agent=2"]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    return load_config("ppo_trainer", [*required, *small, mini, "algorithm.adv_estimator=rloo", *overrides])


class Prompts:
    """Prompts numbered in the order they are drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self, n: int) -> list[Prompt]:
        self.drawn += n
        return [Prompt((1,), "test", {"number": i}) for i in range(self.drawn - n, self.drawn)]


class Rollouts:
    """Stands for the engines: the rewards of prompt i are `rewards[i]`, that of its greedy answer is `greedy[i]`."""

    def __init__(self, rewards: Sequence[Sequence[float]], greedy: Sequence[float | None] = ()) -> None:
        self.rewards, self.greedy = rewards, greedy
        self.stats = {"env/failed_ratio": 0.0, "env/redraws": 0.0}

    def collect(
        self, prompts: Sequence[Prompt], n: int, step: int, how: str = "train", first_group: int = 0
    ) -> list[Trajectory]:
        found = []
        for position, prompt in enumerate(prompts):
            rewards = self.rewards[prompt.row["number"]] if how == "train" else [self.greedy[prompt.row["number"]]]
            assert len(rewards) == n
            for reward in rewards:
                segments = [Segment(Source.PROMPT, (1,)), Segment(Source.POLICY, (2,), (-1.0,))]
                status = Status.FAILED if reward is None else Status.ANSWERED
                trajectory = Trajectory(f"{how}-{step}-{first_group + position}", prompt, segments, status)
                trajectory.events = [{"reward": reward}]
                found.append(trajectory)
        return found


class Scorer:
    stats = {"reward/unavailable_ratio": 0.0}

    def score(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        usable = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        for trajectory in usable:
            trajectory.reward = trajectory.events[0]["reward"]
        return usable


def collector(rollouts: Rollouts, *overrides: str) -> Collector:
    return Collector(make_config(*overrides), Prompts(), rollouts, Scorer())  # type: ignore[arg-type]


FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")


def test_one_round_without_filtering() -> None:
    collected = collector(Rollouts([(1, 1), (0, 1)])).collect(1)
    assert collected.batch.rows["reward"].tolist() == [1, 1, 0, 1]
    assert collected.batch.rows["group"].tolist() == [0, 0, 1, 1]
    assert collected.metrics == {"env/failed_ratio": 0.0, "env/redraws": 0.0, "reward/unavailable_ratio": 0.0}


def test_groups_of_equal_rewards_are_replaced() -> None:
    # round 1: one useless group; round 2: two useful ones, of which one is needed
    collected = collector(Rollouts([(1, 1), (0, 1), (1, 0), (0, 1)]), *FILTER).collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [1, 1, 2, 2]
    assert len({t.group_id for t in collected.sampled}) == 4, "groups of two rounds have different names"
    assert collected.metrics["filter_groups/rounds"] == 2 and collected.metrics["filter_groups/kept"] == 0.75
    assert len(collected.sampled) == 8


def test_failures_and_redraws_are_those_of_all_rounds() -> None:
    """Round 1: 4 of 8 attempts failed and all were drawn again. Round 2: none of 4."""

    class Failing(Rollouts):
        def collect(self, prompts: Sequence[Prompt], n: int, *args: Any, **kwargs: Any) -> list[Trajectory]:
            found = super().collect(prompts, n, *args, **kwargs)
            first = prompts[0].row["number"] == 0
            self.stats = {"env/failed_ratio": 0.5, "env/redraws": 4.0} if first else Rollouts([]).stats
            return found

    collected = collector(Failing([(1, 1), (0, 1), (1, 0), (0, 1)]), *FILTER).collect(1)
    assert collected.metrics["env/failed_ratio"] == 4 / 12 and collected.metrics["env/redraws"] == 4


def test_filtering_ends_after_its_rounds() -> None:
    collected = collector(Rollouts([(1, 1), (0, 1), (1, 1), (0, 0)]), *FILTER).collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [1, 1]


def test_when_every_group_is_useless_the_last_round_stays() -> None:
    collected = collector(Rollouts([(1, 1), (0, 0), (1, 1), (0, 0)]), *FILTER).collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [2, 2, 3, 3]
    assert collected.metrics["filter_groups/kept"] == 0


def test_the_baseline_of_remax_is_the_greedy_reward_of_the_same_prompt() -> None:
    rollouts = Rollouts([(1, 0), (0, 1)], greedy=[0.5, 1.0])
    batch = collector(rollouts, "algorithm.adv_estimator=remax").collect(1).batch
    assert batch.rows["baseline"].tolist() == [0.5, 0.5, 1.0, 1.0]


def test_a_group_whose_greedy_answer_failed_is_not_trained_on() -> None:
    rollouts = Rollouts([(1, 0), (0, 1)], greedy=[None, 1.0])
    collected = collector(rollouts, "algorithm.adv_estimator=remax").collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [1, 1]
    assert collected.batch.rows["baseline"].tolist() == [1.0, 1.0]
