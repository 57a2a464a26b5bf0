"""Rewards of single turns: from rule or environment to the tokens that they are credited to, stored and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from run_config import run_config
from sequences import in_sequences

from verl.errors import RewardError
from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.tracking.spans import Timer
from verl.tracking.trajectory_store import load_trajectories, write_trajectories
from verl.trainer.estimates import Estimator, token_rewards
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.sampling.scoring import FunctionReward, score_trajectories
from verl.workers.roles import ActorGroup


def searched(**of_second_turn: Any) -> Trajectory:
    """Two turns, of 2 and 3 tokens."""
    return Trajectory(
        "g",
        Prompt((1, 2), "t", {}),
        [
            Segment(Source.PROMPT, (1, 2)),
            Segment(Source.POLICY, (3, 4), (-1.0, -1.0)),
            Segment(Source.ENVIRONMENT, (5,)),
            Segment(Source.POLICY, (6, 7, 8), (-1.0, -1.0, -1.0)),
        ],
        Status.ANSWERED,
        num_turns=2,
        events=[{"action": "search"}, {"action": "answer"} | of_second_turn],
    )


class Gives:
    def __init__(self, result: Any) -> None:
        self.result = result

    def score(self, trajectory: Trajectory, tokenizer: Any) -> Any:
        return self.result


def scored(result: Any, *trajectories: Trajectory) -> list[Trajectory]:
    return score_trajectories(Gives(result), trajectories or [searched()], None)


def test_a_turn_has_its_reward_at_its_last_token_and_the_rest_is_at_the_end() -> None:
    [one] = scored({"score": 1.0, "turns": {0: 0.25}, "exact_match": 1.0})
    assert (one.reward, one.turn_rewards, one.reward_components) == (1.25, (0.25, 0.0), {"exact_match": 1.0})
    reward_T = token_rewards(TrainBatch.from_trajectories([one]))
    assert reward_T.tolist() == [0, 0, 0, 0.25, 0, 0, 0, 1.0]
    # in two sequences they are the same, after the context
    batch = TrainBatch.from_trajectories([in_sequences(one, 3)])
    assert token_rewards(batch)[batch.tokens["loss_mask"]].tolist() == [0, 0.25, 0, 0, 1.0]


def test_a_turn_without_tokens_has_no_place_and_shifts_no_other() -> None:
    """It was answered, so it counts; its reward is left to the end."""
    one = searched()
    one.segments[3:3] = [Segment(Source.ENVIRONMENT, (9,))]
    one.num_turns, one.events = 3, [{"turn": 0}, {"turn": 1}, {"turn": 2}]
    scored({"score": 1.0, "turns": {0: 0.25, 1: 0.5, 2: -1.0}}, one)
    assert token_rewards(TrainBatch.from_trajectories([one])).tolist() == [0, 0, 0, 0.25, 0, 0, 0, 0, 0.5]


def test_turns_without_a_reply_between_them_are_credited_apart() -> None:
    """The environment answered nothing, so no token lies between the two turns."""
    one, other = searched(), searched()
    for trajectory in (one, other):
        del trajectory.segments[2]
    scored({"score": 0.0, "turns": {0: 1.0}}, one)
    scored({"score": 0.0, "turns": {1: 0.5}}, other)
    required = ["data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"]
    own = ["actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.actor.use_rollout_log_probs=true"]
    config = run_config([*required, *own, "algorithm.adv_estimator=grpo_turns"])
    batch = TrainBatch.from_trajectories([one, other])
    Estimator(config).prepare(batch, cast(ActorGroup, None), None, Timer())
    assert batch.tokens["advantages"].tolist() == [0, 0, 0.5, 0.5, -0.5, -0.5, -0.5, 0, 0, -0.5, -0.5, 0.5, 0.5, 0.5]


def test_those_of_the_environment_count_too() -> None:
    [one] = scored({"score": 0.5, "turns": {1: -0.25}}, searched(turn_reward=0.5))
    assert (one.reward, one.turn_rewards) == (0.75, (0.0, 0.25))
    [other] = scored(0.5, searched(turn_reward=torch.tensor(2)))
    assert (other.reward, other.turn_rewards) == (2.5, (0.0, 2.0))
    [plain] = scored(0.5)
    assert (plain.reward, plain.turn_rewards) == (0.5, ())
    # beside one that has some, a trajectory without any is rewarded at its end
    reward_T = token_rewards(TrainBatch.from_trajectories([plain, other]))
    assert reward_T.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5] + [0, 0, 0, 0, 0, 0, 0, 2.5]


@pytest.mark.parametrize(
    ("result", "event", "said"),
    [
        ({"score": 1, "turns": {2: 1.0}}, {}, "gave turn 2 a reward; its 2 turns are counted from 0"),
        (
            {"score": 1, "turns": [1.0]},
            {},
            r"gave the turns \[1.0\], which are not {number of the turn, from 0: reward}",
        ),
        ({"score": 1, "turns": {"0": 1.0}}, {}, "which are not {number of the turn"),
        ({"score": 1, "turns": {-1: 1.0}}, {}, "which are not {number of the turn"),
        ({"score": 1, "turns": {0: float("nan")}}, {}, "gave nan, which is no finite number, in its turns"),
        (1.0, {"turn_reward": "much"}, "gave 'much', which is no finite number"),
    ],
)
def test_what_is_no_reward_of_a_turn_is_told(result: Any, event: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        scored(result, searched(**event))


def test_a_function_gives_them_too(byte_tokenizer: Any) -> None:
    def compute_score(**given: Any) -> dict[str, Any]:
        return {"score": 0.0, "turns": {0: -0.5}}

    one = searched()
    one.prompt.row["reward_model"] = {"ground_truth": "x"}
    score_trajectories(FunctionReward(compute_score, {}), [one], byte_tokenizer)
    assert (one.reward, one.turn_rewards) == (-0.5, (-0.5, 0.0))


def test_they_are_stored_and_told(tmp_path: Path) -> None:
    with_turns, without = scored({"score": 1.0, "turns": {0: 0.25, 1: 0.5}}, searched(), searched())
    without.turn_rewards = ()
    path = write_trajectories(tmp_path, "train", 1, [with_turns, without], decode=str)
    assert [one.turn_rewards for one in load_trajectories(path)] == [(0.25, 0.5), ()]
    metrics = step_metrics([with_turns, without], None)
    assert (metrics["reward/turn_0"], metrics["reward/turn_1"]) == (0.25, 0.5) and "reward/turn_2" not in metrics
    assert not any(name.startswith("reward/turn_") for name in step_metrics([without], None))


def test_the_estimator_can_be_set() -> None:
    config = run_config(["algorithm.adv_estimator=grpo_turns", "actor_rollout_ref.rollout.n_agent=2"])
    assert config.algorithm.adv_estimator == "grpo_turns"
