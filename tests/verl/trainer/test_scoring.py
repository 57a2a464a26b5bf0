"""Rewards: one by one or many at once; what cannot be scored is masked and counted, never a 0."""

from __future__ import annotations

import math
import threading
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from run_config import run_config

from verl.agent.text import encode_text
from verl.config import Config
from verl.errors import ConfigError, RewardError, RewardUnavailable, RolloutError
from verl.protocol import Prompt, Segment, Source, Status, Trajectory
from verl.trainer.sampling.scoring import Scorer


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


@cache
def config_of(rule: Any, *overrides: str) -> Config:
    return run_config([f"reward.function={__name__}.{rule.__name__}", *overrides])


def scorer(rule: Any, *overrides: str) -> Scorer:
    return Scorer(config_of(rule, *overrides), None)


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


class Gives:
    """Gives what it is asked for."""

    value = None

    def score(self, trajectory, tokenizer):
        return self.value


class GivesAtOnce:
    value = None

    def score_all(self, trajectories, tokenizer):
        return self.value


class Raises:
    def score(self, trajectory, tokenizer):
        return trajectory.prompt.row["no_such_column"]


def asked_for(value: object) -> list[Trajectory]:
    Gives.value = value
    row = {"question": "Which river?", "extra_info": {"index": 7}}
    trajectories = [Trajectory("g", Prompt((1,), "nq", row), status=Status.ANSWERED)]
    scorer(Gives).score(trajectories)
    return trajectories


@pytest.mark.parametrize(
    ("given", "reward", "components"),
    [
        (0.5, 0.5, {}),
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.bool_(True), 1.0, {}),
        (np.array(0.5), 0.5, {}),
        (torch.tensor(0.5), 0.5, {}),
        (torch.tensor([1]), 1.0, {}),
        ((0.5, {"f1": np.float64(0.25)}), 0.5, {"f1": 0.25}),
        ({"score": 0.5}, 0.5, {}),
        ({"score": torch.tensor(0.5), "acc": True, "pred": "Lune"}, 0.5, {"acc": 1.0}),
    ],
)
def test_every_kind_of_number_is_a_reward(given, reward, components):
    [scored] = asked_for(given)
    assert (scored.reward, scored.reward_components) == (reward, components)
    assert type(scored.reward) is float and all(type(value) is float for value in scored.reward_components.values())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (math.nan, "gave nan"),
        (torch.tensor(math.inf), "gave tensor(inf)"),
        ((0.5, {"f1": math.nan}), "gave nan, which is no finite number, in its components {'f1': nan}"),
        ((0.5, {"f1": "high"}), "gave 'high'"),
        ({"acc": 1.0}, "'score'"),
        (None, "gave None"),
        ("0.5", "gave '0.5'"),
        (torch.tensor([0.5, 1.0]), "gave tensor([0.5000, 1.0000])"),
        ([0.5], "gave [0.5]"),
        ((0.5, 0.25), "gave (0.5, 0.25)"),
    ],
)
def test_what_is_no_number_is_told_with_the_reward_and_the_row(given, said):
    with pytest.raises(RewardError) as caught:
        asked_for(given)
    for part in (f"{__name__}.Gives", said, "data_source 'nq', index 7, question 'Which river?'"):
        assert part in str(caught.value)


def test_a_rule_that_raises_is_told_with_its_line():
    trajectories = episodes(1)
    with pytest.raises(
        RewardError, match=r"Raises raised KeyError: 'no_such_column' \(test_scoring.py:\d+\)"
    ) as caught:
        scorer(Raises).score(trajectories)
    assert "data_source 't'" in str(caught.value) and "RewardUnavailable" in str(caught.value)


def test_many_at_once_are_as_many_and_each_a_number():
    GivesAtOnce.value = np.array([0.5, 1.0])
    assert [t.reward for t in scorer(GivesAtOnce).score(episodes(1, 2))] == [0.5, 1.0]
    for value, said in (([0.5], "1 scores for 2 trajectories"), (0.5, "gave 0.5"), ([0.5, math.nan], "gave nan")):
        GivesAtOnce.value = value
        with pytest.raises(RewardError, match=said):
            scorer(GivesAtOnce).score(episodes(1, 2))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, right=1.0):
    """As a user of verl writes it."""
    if extra_info["index"] == 3:
        raise RewardUnavailable("down")
    return {"score": right * (solution_str.strip() == f"{data_source} {ground_truth}"), "index": extra_info["index"]}


def no_score(trajectory):
    return 1.0


def said(tokenizer, *texts: str, index: int = 0) -> Trajectory:
    """A trajectory whose environment answers each turn of the policy."""
    row = {"reward_model": {"ground_truth": "Lune"}, "extra_info": {"index": index}}
    segments = [Segment(Source.PROMPT, (1,))]
    for text in texts:
        ids = encode_text(tokenizer, text)
        segments += [Segment(Source.POLICY, ids, (-1.0,) * len(ids)), Segment(Source.ENVIRONMENT, ids)]
    return Trajectory("g", Prompt((1,), "nq", row), segments, status=Status.ANSWERED)


def test_a_function_as_users_of_verl_write_it(byte_tokenizer):
    right, wrong = said(byte_tokenizer, "nq Lune<|endoftext|>"), said(byte_tokenizer, "nq", "Osk")
    down = said(byte_tokenizer, "nq Lune", index=3)
    found = Scorer(config_of(compute_score, "reward.kwargs={right: 2.0}"), byte_tokenizer)
    assert found.score([right, wrong, right]) == [right, wrong, right]
    assert (right.reward, right.reward_components, wrong.reward) == (2.0, {"index": 0.0}, 0.0)
    with pytest.raises(RolloutError, match="all 1 trajectories failed: down"):
        found.score([down])
    assert (down.status, down.reward) == (Status.FAILED, None)


@pytest.mark.parametrize("rule", [no_score, episodes])
def test_a_function_with_other_arguments_is_refused_at_once(rule):
    with pytest.raises(ConfigError, match=f"{rule.__name__}.*data_source, solution_str, ground_truth, extra_info"):
        scorer(rule)


def test_a_class_without_a_score_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"Trajectory.*score\(trajectory, tokenizer\)"):
        scorer(Trajectory, "reward.kwargs={group_id: g, prompt: p}")


def test_too_much_that_cannot_be_scored_is_said_before_all_is_sampled():
    """Three of at least ten may be missing; what an abandoned step has asked for does not count in the next one."""
    found = scorer(Length, "agent.max_failed_ratio=0.3")
    found.score_some(episodes(13, 13, 13))
    found.require_enough_so_far(10)
    found.score_some(episodes(13))
    with pytest.raises(RolloutError, match="4 of 4 .* so far, more than agent.max_failed_ratio=0.3 allows for 10"):
        found.require_enough_so_far(10)
    found.begin()
    found.score_some(episodes(2))
    found.require_enough_so_far(1)
    found.require_enough(episodes(2))
    assert found.stats == {"reward/unavailable_ratio": 0.0}


class Beside(Length):
    """Holds each call until `go` is set; notes the thread and how many it scores at once."""

    scores_while_sampling = True
    go = threading.Event()
    began = threading.Event()
    calls: ClassVar[list[tuple[str, int]]] = []

    def score_all(self, trajectories, tokenizer):
        Beside.calls.append((threading.current_thread().name, len(trajectories)))
        Beside.began.set()
        assert Beside.go.wait(30)
        if any(t.num_turns == 99 for t in trajectories):
            raise ValueError("no such number")
        return [RewardUnavailable("down") if t.num_turns == 13 else self.score(t, tokenizer) for t in trajectories]


@pytest.fixture
def beside():
    Beside.calls.clear()
    Beside.go.clear()
    Beside.began.clear()
    yield Beside
    Beside.go.set()


def test_groups_are_scored_while_others_are_sampled(beside):
    """What comes while the first are being scored is scored at once, in the same thread; the rest is scored here."""
    first, second, third, late = episodes(2, 3), episodes(13, 4), episodes(5, 6), episodes(7)
    found = scorer(Beside, "agent.max_failed_ratio=0.2")
    found.begin()
    found.score_ahead(first)
    assert beside.began.wait(30) and first[0].reward is None
    found.score_ahead(second)
    found.score_ahead(third)
    found.score_ahead(third)  # is not handed over twice
    beside.go.set()
    everything = [*first, *second, *third, *late]
    assert [t.num_turns for t in found.score(everything)] == [2, 3, 4, 5, 6, 7]
    assert [t.reward for t in everything] == [2.0, 3.0, None, 4.0, 5.0, 6.0, 7.0]
    assert beside.calls == [("scoring", 2), ("scoring", 4), ("MainThread", 1)]
    assert found.stats == {"reward/unavailable_ratio": 1 / 7}


def test_what_scoring_raises_beside_sampling_reaches_the_step(beside):
    beside.go.set()
    found = scorer(Beside)
    wrong = episodes(99)
    found.score_ahead(wrong)
    with pytest.raises(RewardError, match="no such number"):
        found.score(wrong)


def test_what_is_carried_over_is_scored_once_and_counts_where_it_is_trained(beside):
    beside.go.set()
    found = scorer(Beside, "agent.max_failed_ratio=0.5")
    now, carried, abandoned = episodes(1, 2), episodes(13, 3), episodes(4)
    found.begin()
    for group in (now, carried, abandoned):
        found.score_ahead(group)
    found.score(now)
    assert found.stats == {"reward/unavailable_ratio": 0.0}
    found.begin(carried)
    found.score_ahead(carried)
    assert found.score(carried) == carried[1:]
    assert found.stats == {"reward/unavailable_ratio": 0.5}
    assert sum(number for _, number in beside.calls) == 5


def test_a_deterministic_run_scores_in_order_after_sampling(beside):
    beside.go.set()
    found = scorer(Beside, "trainer.deterministic=true")
    trajectories = episodes(1, 2)
    found.score_ahead(trajectories)
    assert not beside.calls
    found.score(trajectories)
    assert beside.calls == [("MainThread", 2)]
