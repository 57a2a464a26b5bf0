"""`SearchTurnsReward`: what a turn that searches is given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reward_episodes import play

from search_r1.rewards.search_turns import SearchTurnsReward
from verl.config import load_config
from verl.errors import ConfigError, DataError
from verl.protocol import IS_SUMMARY
from verl.trainer.sampling.scoring import make_reward, score_trajectories

SEARCH = "<think>a</think><search>q</search>"
GOOD = "<think>b</think><answer> Rome </answer>"
WRONG = "<think>b</think><answer> Paris </answer>"


def test_turns_that_search(byte_tokenizer):
    """The same page each time: the first search brings the answer, the second only what was there."""
    reward = SearchTurnsReward({"exact_match": 1.0}, gain=0.5, redundancy=0.25, cost=0.1)
    [trajectory] = score_trajectories(reward, [play(byte_tokenizer, [SEARCH, SEARCH, GOOD])], byte_tokenizer)
    assert trajectory.turn_rewards == pytest.approx((0.5 - 0.1, -0.25 - 0.1, 0.0))
    assert trajectory.reward == pytest.approx(1.0 + 0.4 - 0.35)
    assert trajectory.reward_components == {"exact_match": 1.0, "gain": 1.0, "redundancy": 1.0, "cost": 2.0}
    # What the results do not contain is no gain. Without a search no turn has a reward.
    other, quick = (
        play(byte_tokenizer, [SEARCH + GOOD, WRONG], targets=["Oslofjord"]),
        play(byte_tokenizer, [GOOD, WRONG]),
    )
    score_trajectories(reward, [other, quick], byte_tokenizer)
    assert other.turn_rewards == pytest.approx((-0.1, 0.0)) and quick.turn_rewards == ()
    config = load_config("ppo_trainer", ["reward.kwargs={weights: {f1: 1}}"])
    built = make_reward(config, "search_r1.rewards.search_turns.SearchTurnsReward", dict(config.reward.kwargs))
    assert built.of_turns == {"gain": 0.1, "redundancy": -0.1, "cost": 0.0}


def test_passages_without_an_id_are_new(byte_tokenizer):
    """An engine's passages may have none: nothing says that two of them are the same."""
    reward = SearchTurnsReward({"exact_match": 1.0}, gain=0.0, redundancy=0.4)
    trajectory = play(byte_tokenizer, [SEARCH, SEARCH, WRONG])
    for event, found in zip(trajectory.events, (["", "a"], ["", "a"]), strict=False):
        event["document_ids"] = found
    score_trajectories(reward, [trajectory], byte_tokenizer)
    assert trajectory.turn_rewards == pytest.approx((0.0, -0.2, 0.0))


@pytest.mark.parametrize(
    "row", [{"metadata": json.dumps({"evidence": ["a", "b", "c", "a"]})}, {"evidence": ["a", "b", "c"]}]
)
def test_evidence_counts_when_it_is_found_first(byte_tokenizer, row: dict[str, Any]):
    """Of three documents the first search finds one, the second that one again and another, the third none."""
    reward = SearchTurnsReward({"exact_match": 1.0}, gain=0.6, redundancy=0.0, gain_for="evidence")
    trajectory = play(byte_tokenizer, [SEARCH, SEARCH, SEARCH, WRONG])
    trajectory.prompt.row.update(row)
    for event, found in zip(trajectory.events, (["a", "x"], ["a", "b"], ["x", "y"]), strict=False):
        event["document_ids"] = found
    score_trajectories(reward, [trajectory], byte_tokenizer)
    assert trajectory.turn_rewards == pytest.approx((0.2, 0.2, 0.0, 0.0))
    assert trajectory.reward == pytest.approx(0.4) and trajectory.reward_components["gain"] == pytest.approx(2 / 3)


def test_evidence_that_a_row_does_not_name(byte_tokenizer):
    reward = SearchTurnsReward(gain_for="evidence")
    trajectory = play(byte_tokenizer, [SEARCH, WRONG])
    with pytest.raises(DataError, match="names no evidence documents"):
        reward.score_all([trajectory], byte_tokenizer)
    trajectory.prompt.row["metadata"] = json.dumps({"evidence": "a"})
    with pytest.raises(DataError, match="names no evidence documents"):
        reward.score_all([trajectory], byte_tokenizer)
    with pytest.raises(ConfigError, match="gain_for='passages' is neither 'answers' nor 'evidence'"):
        SearchTurnsReward(gain_for="passages")


def test_a_summary_before_the_search_that_brings_the_answer(byte_tokenizer):
    """Turns are counted with the summaries, as rewards of turns are."""
    reward = SearchTurnsReward({"exact_match": 1.0}, gain=0.5, redundancy=0.0)
    trajectory = play(byte_tokenizer, ["no tag", SEARCH, SEARCH, WRONG])
    trajectory.events[0][IS_SUMMARY] = True
    score_trajectories(reward, [trajectory], byte_tokenizer)
    assert trajectory.turn_rewards == pytest.approx((0.0, 0.5, 0.0, 0.0))
