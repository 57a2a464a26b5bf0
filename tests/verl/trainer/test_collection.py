"""Which trajectories a step trains on: rounds of dynamic sampling, and the greedy baselines of remax."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from content_scorer import ContentScorer
from run_config import run_config
from transformers import PreTrainedTokenizerFast

from verl.config import Config
from verl.data.prompts import Curriculum, PromptSource
from verl.errors import RewardUnavailable, RolloutError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.rollout.episode_queue import Group, NextGroups
from verl.trainer.sampling.collection import Collector
from verl.trainer.sampling.scoring import Scorer as RealScorer


@cache
def make_config(*overrides: str) -> Config:
    required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
    small = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n_agent=2"]
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    return run_config([*required, *small, mini, "algorithm.adv_estimator=rloo", *overrides])


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

    def collect_groups(self, groups: Sequence[Group], step: int, next_groups: NextGroups) -> None:
        """One group after the other, the later ones first."""
        waiting = list(groups)
        while waiting:
            group = waiting.pop()
            group.results = {index: self.play(group, mode, index) for index, mode in enumerate(group.modes)}
            waiting += next_groups([group], not waiting) or []

    def play(self, group: Group, mode: str, index: int) -> Trajectory:
        number = group.prompt.row["number"]
        reward = self.greedy[number] if mode == "greedy" else self.rewards[number][index]
        segments = [Segment(Source.PROMPT, (1,)), Segment(Source.POLICY, (2,), (-1.0,))]
        status = Status.FAILED if reward is None else Status.ANSWERED
        return Trajectory(group.id, group.prompt, segments, status, events=[{"reward": reward}])


class Scorer(ContentScorer):
    def score(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
        usable = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        for trajectory in usable:
            trajectory.reward = trajectory.events[0]["reward"]
        return usable

    score_some = score


def collector(rollouts: Rollouts, *overrides: str) -> Collector:
    return Collector(make_config(*overrides), Prompts(), rollouts, Scorer())  # type: ignore[arg-type]


FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2")


def test_one_round_without_filtering() -> None:
    collected = collector(Rollouts([(1, 1), (0, 1)])).collect(1)
    assert collected.batch.rows["reward"].tolist() == [1, 1, 0, 1]
    assert collected.batch.rows["group"].tolist() == [0, 0, 1, 1]
    assert collected.metrics == {"env/failed_ratio": 0.0, "env/redraws": 0.0, "reward/unavailable_ratio": 0.0}


def test_groups_of_equal_rewards_are_replaced() -> None:
    """Each useless group by one new prompt: three are drawn, and the fourth is left for the next step."""
    one = collector(Rollouts([(1, 1), (0, 1), (1, 0), (0, 1)]), *FILTER)
    collected = one.collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [1, 1, 2, 2]
    assert [t.group_id for t in collected.sampled[::2]] == ["train-1-0", "train-1-1", "train-1-2"]
    assert collected.metrics["filter_groups/rounds"] == 1.5 and collected.metrics["filter_groups/kept"] == 2 / 3
    assert len(collected.sampled) == 6 and one.prompts.drawn == 3  # type: ignore[attr-defined]


class Unavailable(Scorer):
    """A reward that cannot be had for the first `failing` trajectories, under the rule of the real scorer."""

    max_failed_ratio = 0.5
    require_enough_so_far = RealScorer.require_enough_so_far

    def __init__(self, failing: int) -> None:
        self.failing, self._num_requested, self._num_unavailable = failing, 0, 0

    def score_some(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        self._num_requested += len(trajectories)
        for trajectory in trajectories:
            trajectory.reward = trajectory.events[0]["reward"]
            if self._num_unavailable < self.failing:
                self._num_unavailable += 1
                trajectory.status, trajectory.reward = Status.FAILED, None
        return list(trajectories)


@pytest.mark.parametrize(("failing", "stops"), [(2, False), (3, True)])
def test_rewards_that_fail_early_count_against_the_whole_step(failing: int, stops: bool) -> None:
    """A step wants 2 groups of 2: of 4 trajectories a half may fail, even where only the first 2 are scored yet."""
    one = Collector(make_config(*FILTER), Prompts(), Rollouts([(0, 1)] * 4), Unavailable(failing))  # type: ignore[arg-type]
    if stops:
        with pytest.raises(RolloutError, match="3 of 4 trajectories could not be scored so far"):
            one.collect(1)
    else:
        assert len(one.collect(1).trained) == 4


def test_in_a_deterministic_run_groups_are_judged_in_their_order() -> None:
    """Rewards may draw from shared generators; the engines complete the later group first."""
    asked: list[int] = []

    class Watching(Scorer):
        def score_some(self, trajectories: Sequence[Trajectory], validate: bool = False) -> list[Trajectory]:
            asked.extend(t.prompt.row["number"] for t in trajectories[::2])
            return self.score(trajectories)

    rewards = [(1, 1), (0, 1), (1, 0), (0, 1)]
    for overrides, order in ((("trainer.deterministic=true",), [0, 1, 2]), ((), [1, 0, 2])):
        asked.clear()
        config = make_config(*FILTER, *overrides)
        Collector(config, Prompts(), Rollouts(rewards), Watching()).collect(1)  # type: ignore[arg-type]
        assert asked == order


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


class InSequences(Rollouts):
    """The second trajectory of each prompt has a further sequence."""

    def play(self, group: Group, mode: str, index: int) -> Trajectory:
        one = super().play(group, mode, index)
        one.segments += [Segment(Source.CONTEXT, (1, 3)), Segment(Source.POLICY, (4,), (-1.0,))] * (index == 1)
        return one


def test_all_rows_of_a_rollout_have_its_baseline_and_reward() -> None:
    rollouts = InSequences([(1, 0), (0, 1)], greedy=[0.5, 1.0])
    collected = collector(rollouts, "algorithm.adv_estimator=remax").collect(1)
    assert collected.batch.rollout_B.tolist() == [0, 1, 1, 2, 3, 3] and len(collected.trained) == 4
    assert collected.batch.rows["baseline"].tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert collected.batch.rows["reward"].tolist() == [1, 0, 0, 0, 1, 1]


def test_a_group_whose_greedy_answer_failed_is_not_trained_on() -> None:
    rollouts = Rollouts([(1, 0), (0, 1)], greedy=[None, 1.0])
    collected = collector(rollouts, "algorithm.adv_estimator=remax").collect(1)
    assert [t.prompt.row["number"] for t in collected.trained] == [1, 1]
    assert collected.batch.rows["baseline"].tolist() == [1.0, 1.0]


class Noting:
    """The reward of a stand-in's trajectory; notes of which prompts it was asked."""

    scores_while_sampling = True
    asked: ClassVar[list[int]] = []
    done = threading.Event()

    def score(self, trajectory: Trajectory, tokenizer: object) -> float:
        number = trajectory.prompt.row["number"]
        Noting.asked.append(number)
        if number == 1:
            Noting.done.set()
        return float(trajectory.events[0]["reward"])


class OneByOne(Rollouts):
    """Completes the second group only when the first, which is that of prompt 1, has been scored."""

    def play(self, group: Group, how: str, index: int) -> Trajectory:
        if group.prompt.row["number"] == 0:
            assert Noting.done.wait(30), "the first group is not scored before the second is complete"
        return super().play(group, how, index)


@pytest.mark.parametrize("estimator", ["rloo", "remax"])
def test_a_group_is_scored_while_the_next_is_sampled(estimator: str) -> None:
    Noting.asked.clear()
    Noting.done.clear()
    config = make_config(f"algorithm.adv_estimator={estimator}", f"reward.function={__name__}.Noting")
    rollouts = OneByOne([(1, 0), (0, 1)], greedy=[0.5, 1.0])
    batch = Collector(config, Prompts(), rollouts, RealScorer(config, None)).collect(1).batch  # type: ignore[arg-type]
    assert batch.rows["reward"].tolist() == [1, 0, 0, 1]
    samples = 3 if estimator == "remax" else 2  # the greedy answer, too, once
    assert sorted(Noting.asked) == [0] * samples + [1] * samples
    if estimator == "remax":
        assert batch.rows["baseline"].tolist() == [0.5, 0.5, 1.0, 1.0]


class Hesitating(Noting):
    """Scores the group that is complete first only when the other one has been sampled."""

    sampled = threading.Event()

    def score(self, trajectory: Trajectory, tokenizer: object) -> float:
        assert Hesitating.sampled.wait(30), "sampling waits for the reward of its first group"
        return super().score(trajectory, tokenizer)


class OneAfterTheOther(Rollouts):
    def play(self, group: Group, how: str, index: int) -> Trajectory:
        if group.prompt.row["number"] == 0:
            Hesitating.sampled.set()
        return super().play(group, how, index)


def test_dynamic_sampling_goes_on_while_a_group_is_scored() -> None:
    """The first group turns out to be useless when all others are complete, and is replaced then."""
    Hesitating.sampled.clear()
    config = make_config(*FILTER, f"reward.function={__name__}.Hesitating")
    rollouts = OneAfterTheOther([(1, 0), (1, 1), (0, 1)])
    collected = Collector(config, Prompts(), rollouts, RealScorer(config, None)).collect(1)  # type: ignore[arg-type]
    assert [t.prompt.row["number"] for t in collected.trained] == [0, 0, 2, 2]
    assert collected.batch.rows["reward"].tolist() == [1, 0, 0, 1]
    assert collected.metrics["filter_groups/kept"] == 2 / 3


class Judging(Noting):
    """Has no verdict where it should give 9."""

    def score(self, trajectory: Trajectory, tokenizer: object) -> float:
        if trajectory.events[0]["reward"] == 9:
            raise RewardUnavailable("no verdict")
        return float(trajectory.events[0]["reward"])


class AtOnce(RealScorer):
    """Its thread has scored a group before anybody asks for the rewards."""

    def score_ahead(self, trajectories: Sequence[Trajectory]) -> None:
        super().score_ahead(trajectories)
        while not self.can_score_now(trajectories):
            os.sched_yield()


def test_what_was_scored_while_others_were_sampled_counts_among_what_was_asked_for() -> None:
    """Three groups of four, of which one is useless; each trajectory is counted once."""
    size = ("data.train_batch_size=2", "actor_rollout_ref.rollout.n_agent=4", "agent.max_failed_ratio=0.2")
    config = make_config(*FILTER, *size, f"reward.function={__name__}.Judging")
    rollouts = Rollouts([(0, 1, 1, 9), (1, 1, 1, 1), (1, 0, 1, 0)])
    collected = Collector(config, Prompts(), rollouts, AtOnce(config, None)).collect(1)  # type: ignore[arg-type]
    assert collected.metrics["reward/unavailable_ratio"] == 1 / 12 and len(collected.trained) == 7


CURRICULUM = ("data.curriculum.enable=true", "data.train_batch_size=4", "actor_rollout_ref.rollout.n_agent=3")


@pytest.fixture
def five(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Callable[[float], PromptSource]:
    """Prompts 0 to 4 in this order, with the probability that one is drawn whose last rewards were equal."""
    row = {"data_source": "test", "reward_model": {"ground_truth": "x"}}
    rows = [row | {"prompt": [{"role": "user", "content": f"{number}?"}], "number": number} for number in range(5)]
    file = str(tmp_path / "five.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)

    def make(probability: float) -> PromptSource:
        curriculum = Curriculum(probability, min(probability, 0.05), min_prompts=1)
        return PromptSource(file, byte_tokenizer, max_start_length=99, shuffle=False, curriculum=curriculum)

    return make


NEVER = 1e-12


def numbers(trajectories: Sequence[Trajectory]) -> list[int]:
    """The prompts of whole groups."""
    return [trajectory.prompt.row["number"] for trajectory in trajectories[::3]]


def test_a_prompt_that_was_always_right_or_always_wrong_is_skipped_in_the_next_epoch(
    five: Callable[[float], PromptSource],
) -> None:
    """0 is always right, 3 always wrong."""
    rewards = [(1, 1, 1), (0, 1, 1), (0, 0, 1), (0, 0, 0), (1, 1, 0)]
    one = Collector(make_config(*CURRICULUM), five(NEVER), Rollouts(rewards), Scorer())  # type: ignore[arg-type]
    first, second = one.collect(1), one.collect(2)
    assert numbers(first.trained) == [0, 1, 2, 3] and numbers(second.trained) == [4, 1, 2, 4]
    assert first.metrics["curriculum/skipped"] == 0 and second.metrics["curriculum/skipped"] == 2 / 6
    assert first.metrics["curriculum/zero_variance_prompts"] == 2 / 5


def test_a_failed_trajectory_says_nothing_of_its_prompt(five: Callable[[float], PromptSource]) -> None:
    """What is left of the group of 1 has equal rewards, so 1 keeps what it had; 0 has different ones without it."""
    rollouts = Rollouts([(1, 1, 1)] * 5)
    one = Collector(make_config(*CURRICULUM), five(1.0), rollouts, Scorer())  # type: ignore[arg-type]
    assert one.collect(1).metrics["curriculum/zero_variance_prompts"] == 4 / 5
    rollouts.rewards = [(None, 0, 1), (None, 0, 0), (1, 1, 1), (1, 1, 1), (None, 1, 1)]
    second = one.collect(2)
    assert numbers(second.sampled) == [4, 0, 1, 2]
    assert second.metrics["curriculum/zero_variance_prompts"] == 3 / 5  # 1, 2, 3


def test_a_group_that_dynamic_sampling_dropped_counts_for_the_curriculum(
    five: Callable[[float], PromptSource],
) -> None:
    """0 is dropped, and 2 that takes its place, too: it is 3 that is trained on."""
    rewards = [(1, 1, 1), (0, 1, 1), (0, 0, 0), (1, 0, 0), (1, 0, 1)]
    config = make_config(*FILTER, *CURRICULUM[::2], "data.train_batch_size=2")
    one = Collector(config, five(NEVER), Rollouts(rewards), Scorer())  # type: ignore[arg-type]
    first, second, third = (one.collect(step) for step in (1, 2, 3))
    assert numbers(first.sampled) == [0, 1, 2, 3] and numbers(first.trained) == [1, 3]
    assert first.metrics["curriculum/zero_variance_prompts"] == 2 / 5
    assert numbers(second.sampled) == [4, 1] and numbers(third.sampled) == [3, 4]
    assert second.metrics["curriculum/skipped"] == 1 / 3 and third.metrics["curriculum/skipped"] == 1 / 3
    assert second.metrics["filter_groups/kept"] == 1
