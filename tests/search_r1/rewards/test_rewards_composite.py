"""Composites: weights, options, bounds, what is only logged, one's own components, and what is refused."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from reward_episodes import play

from search_r1.llm_agent.templates import load_template
from search_r1.rewards.component import COMPONENTS
from search_r1.rewards.composite import CompositeReward
from search_r1.rewards.reading import Reading
from verl.config import load_config
from verl.config.loading.command_line import load_config_from_argv
from verl.errors import ConfigError, RewardError, RewardUnavailable
from verl.trainer.metrics.batch import step_metrics, validation_metrics
from verl.trainer.sampling.scoring import Scorer, make_reward, score_trajectories

SEARCH = "<think>a</think><search>capital of Italy</search>"
PARTLY = "<think>b</think><answer>Rome or Milan</answer>"  # F1 0.5 with Rome
NAME = "search_r1.rewards.composite.CompositeReward"


class ShortAnswer:
    """A component of one's own: 1 for an answer of at most `words` words."""

    def __init__(self, words: int = 2) -> None:
        self.words = words

    def __call__(self, reading: Reading) -> float:
        return float(reading.answer is not None and len(reading.answer.split()) <= self.words)


class Down:
    """A component whose server is down for all but the first trajectory."""

    async def measure(self, readings: Sequence[Reading]) -> list[float | RewardUnavailable]:
        return [0.5, *(RewardUnavailable("the judge is down") for _ in readings[1:])]


class Forgetful:
    async def measure(self, readings: Sequence[Reading]) -> list[float | RewardUnavailable]:
        return [0.5]


class Infinite:
    def __call__(self, reading: Reading) -> float:
        return float("inf")


class Nothing:
    """Has neither of the two methods."""


def own(name: str) -> str:
    return f"{__name__}.{name}"


def test_a_weighted_sum(byte_tokenizer):
    trajectory = play(byte_tokenizer, [SEARCH, SEARCH, SEARCH, PARTLY])
    weights = {"f1": 0.7, "retrieval_correct": 0.3, "search_cost": -0.05, "repeated_query": -0.1, "exact_match": 0}
    reward = CompositeReward(weights, options={"search_cost": {"free": 1}})
    # 0.7 x 0.5 + 0.3 x 1 - 0.05 x 2 - 0.1 x 2
    value, components = reward.score(trajectory, byte_tokenizer)
    assert value == pytest.approx(0.35, abs=1e-12)
    counted = {"search_cost": 2.0, "repeated_query": 2.0}
    assert components == {"f1": 0.5, "retrieval_correct": 1.0, "exact_match": 0.0} | counted


@pytest.mark.parametrize(
    ("clip", "value"), [(None, -1.5), ([-1, 1], -1.0), ([-2, 1], -1.5), ((0, 0.5), 0.0), ([-3, -2], -2.0)]
)
def test_bounds(byte_tokenizer, clip, value):
    trajectory = play(byte_tokenizer, [SEARCH, SEARCH, PARTLY])
    assert CompositeReward({"f1": 1, "search_cost": -1}, clip=clip).score(trajectory, byte_tokenizer)[0] == value


def test_a_component_of_ones_own(byte_tokenizer):
    trajectory = play(byte_tokenizer, [PARTLY])
    name = own("ShortAnswer")
    assert CompositeReward({"f1": 1, name: 0.25}).score(trajectory, byte_tokenizer)[0] == 0.5
    reward = CompositeReward({"f1": 1, name: 0.25}, options={name: {"words": 3}})
    assert reward.score(trajectory, byte_tokenizer) == (0.75, {"f1": 0.5, name: 1.0})


def test_what_cannot_be_had_masks_a_trajectory_unless_it_is_only_logged(byte_tokenizer):
    trajectories = [play(byte_tokenizer, [PARTLY]) for _ in range(2)]
    first, second = CompositeReward({"f1": 1, own("Down"): 0.5}).score_all(trajectories, byte_tokenizer)
    assert first == (0.75, {"f1": 0.5, own("Down"): 0.5})
    assert isinstance(second, RewardUnavailable)
    logged = CompositeReward({"f1": 1, own("Down"): 0}).score_all(trajectories, byte_tokenizer)
    assert logged == [(0.5, {"f1": 0.5, own("Down"): 0.5}), (0.5, {"f1": 0.5})]


@pytest.mark.parametrize("weight", [1, 0])
def test_a_value_that_is_no_number(byte_tokenizer, weight):
    with pytest.raises(RewardError, match=r"Infinite gave inf, .* for question 'where\?'"):
        CompositeReward({own("Infinite"): weight}).score(play(byte_tokenizer, [PARTLY]), byte_tokenizer)


def test_values_that_are_missing(byte_tokenizer):
    trajectories = [play(byte_tokenizer, [PARTLY]) for _ in range(2)]
    with pytest.raises(ConfigError, match="Forgetful gave 1 values for 2 trajectories"):
        CompositeReward({own("Forgetful"): 1}).score_all(trajectories, byte_tokenizer)


def test_every_component_is_logged_by_itself(byte_tokenizer):
    """Means over trajectories that did not fail; a component that some lack has its mean over the others."""
    trajectories = [play(byte_tokenizer, [SEARCH, PARTLY]), play(byte_tokenizer, [PARTLY])]
    reward = CompositeReward({"f1": 1, "search_cost": -0.1, own("Down"): 0})
    assert score_trajectories(reward, trajectories, byte_tokenizer) == trajectories
    metrics = step_metrics(trajectories, None)
    logged = {name: value for name, value in metrics.items() if name.startswith("reward/")}
    assert logged == {"reward/f1": 0.5, "reward/search_cost": 0.5, f"reward/{own('Down')}": 0.5}
    assert metrics["critic/score/mean"] == pytest.approx(0.45, abs=1e-12)
    assert validation_metrics(trajectories)["val/reward/nq/search_cost"] == 0.5


def test_on_the_command_line():
    weights = "{weights: {f1: 0.7, search_r1.rewards.answer_components.HasAnswer: 1e-1, search_cost: -0.05}, "
    kwargs = weights + "options: {f1: {unicode: true}, search_cost: {free: 2}}, clip: [-1, 1]}"
    argv = [f"reward.function={NAME}", f"reward.kwargs={kwargs}", "agent.template=research"]
    config = load_config_from_argv(argv)
    reward = make_reward(config, config.reward.function, config.reward.kwargs)
    dotted = "search_r1.rewards.answer_components.HasAnswer"
    assert reward.weights == {"f1": 0.7, dotted: 0.1, "search_cost": -0.05}
    assert (reward.clip, reward.grammar) == ((-1.0, 1.0), load_template("research").grammar)
    assert reward.components["search_cost"].free == 2


@pytest.mark.parametrize(
    ("answer", "f1", "exact"),
    # Precision and recall: 2/3 and 1, 1 and 1/2, 1 and 1, 0 and 0.
    [("New York City", 0.8, 0), ("York", 2 / 3, 0), ("the New York.", 1, 1), ("Boston", 0, 0)],
)
def test_f1_in_training_and_exact_match_in_validation(byte_tokenizer, answer, f1, exact):
    """As docs/rewards.md writes it: half-right answers differ, which exact match would call equal."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
    section = text.partition("### F1 instead of exact match")[2].partition("\n## ")[0]
    written = shlex.split(section.partition("```bash\n")[2].partition("```")[0].replace("\\\n", ""))
    scorer = Scorer(load_config_from_argv([word for word in written if word.startswith("reward.")]), byte_tokenizer)
    for validate, value in ((False, f1), (True, exact)):
        line = f"<think>b</think><answer>{answer}</answer>"
        trajectory = play(byte_tokenizer, [SEARCH, line], targets=["New York"])
        [scored] = scorer.score([trajectory], validate=validate)
        assert scored.reward == pytest.approx(value, abs=1e-12)


def test_all_shipped_components_are_registered_by_the_composite():
    names = {"has_answer", "exact_match", "cover_match", "f1", "valid_format", "retrieval_correct", "research_format"}
    names |= {"search_cost", "repeated_query", "long_think", "refine_correct", "refine_format"}
    assert names <= set(COMPONENTS)
    assert CompositeReward({name: 1.0 for name in names}).weights.keys() == names


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weights": {}}, "one component at least"),
        ({"weights": ["f1"]}, "one component at least"),
        ({"weights": {"f2": 1}}, "no reward component 'f2'.* exact_match, f1"),
        ({"weights": {5: 1}}, "the name 5"),
        ({"weights": {"f1": "0.5"}}, "weight of f1 is '0.5'"),
        ({"weights": {"f1": True}}, "weight of f1 is True"),
        ({"weights": {"f1": None}}, "weight of f1 is None"),
        ({"weights": {"f1": float("nan")}}, "weight of f1 is nan"),
        ({"weights": {"my.Gone": 1}}, "reward component=my.Gone"),
        ({"weights": {own("Nothing"): 1}}, "neither be called"),
        ({"weights": {"f1": 1}, "options": {"exact_match": {}}}, "'exact_match', which has no weight; .* f1"),
        ({"weights": {"f1": 1}, "options": {"f1": True}}, "options of f1 are True"),
        ({"weights": {"f1": 1}, "options": ["f1"]}, "keyword arguments by component"),
        ({"weights": {"f1": 1}, "options": {"f1": {"case": 1}}}, "reward component f1: .*case"),
        ({"weights": {"f1": 1}, "clip": [1, 0]}, r"clip is \[1, 0\]"),
        ({"weights": {"f1": 1}, "clip": [0, 0]}, r"clip is \[0, 0\]"),
        ({"weights": {"f1": 1}, "clip": [0]}, "clip is"),
        ({"weights": {"f1": 1}, "clip": 1}, "clip is 1"),
        ({"weights": {"f1": 1}, "clip": "01"}, "clip is '01'"),
        ({}, "weights"),
        ({"weights": {"f1": 1}, "weight": 1}, "unexpected keyword argument 'weight'"),
    ],
)
def test_what_cannot_be_used(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        make_reward(load_config(), NAME, kwargs)
