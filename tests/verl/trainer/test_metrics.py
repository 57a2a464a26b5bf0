"""Metrics against numbers worked out by hand for three trajectories, one of which failed."""

from __future__ import annotations

import math

import pytest
import torch

from verl.protocol import Prompt, Segment, Source, Status, TrainBatch, Trajectory
from verl.trainer.metrics import step_metrics, validation_metrics


def policy(*ids: int) -> Segment:
    return Segment(Source.POLICY, ids, tuple(-0.5 for _ in ids))


def environment(*ids: int) -> Segment:
    return Segment(Source.ENVIRONMENT, ids)


def trajectory(source: str, status: Status, reward: float | None, *segments: Segment, **counts: int) -> Trajectory:
    prompt_ids = (1, 2, 3) if source == "one" else (1, 2, 3, 4, 5)
    return Trajectory(
        "group",
        Prompt(prompt_ids, source, {}),
        [Segment(Source.PROMPT, prompt_ids), *segments],
        status,
        reward=reward,
        **counts,
    )


@pytest.fixture
def answered() -> Trajectory:
    """3 prompt + 2 policy + 4 retrieved + 3 policy = 12 tokens."""
    segments = (policy(10, 11), environment(20, 21, 22, 23), policy(12, 13, 14))
    return trajectory("one", Status.ANSWERED, 1.0, *segments, num_turns=2, num_valid_actions=2, num_searches=1)


@pytest.fixture
def wandered() -> Trajectory:
    """5 prompt + 1 policy + 2 feedback + 1 policy + 2 retrieved + 1 policy = 12 tokens, one invalid action of three."""
    segments = (policy(10), environment(30, 31), policy(11), environment(20, 21), policy(12))
    return trajectory("two", Status.TURN_LIMIT, 0.0, *segments, num_turns=3, num_valid_actions=2, num_searches=1)


@pytest.fixture
def failed() -> Trajectory:
    """7 sampled tokens that cost time and count in no mean."""
    return trajectory("two", Status.FAILED, None, policy(*range(40, 47)), num_turns=1, num_valid_actions=1)


@pytest.fixture
def batch(answered: Trajectory, wandered: Trajectory) -> TrainBatch:
    batch = TrainBatch.from_trajectories([answered, wandered])
    mask_T = batch.tokens["loss_mask"]
    # 5 policy tokens of advantage 0.6, then 3 of -1; huge values elsewhere must not be seen.
    batch.tokens["advantages"] = torch.full((24,), 1e6)
    batch.tokens["advantages"][mask_T] = torch.tensor([0.6] * 5 + [-1.0] * 3)
    return batch


def test_environment_counts_leave_out_the_failed(
    answered: Trajectory, wandered: Trajectory, failed: Trajectory
) -> None:
    metrics = step_metrics([answered, wandered, failed], None)
    assert metrics["env/number_of_actions/mean"] == 2.5
    assert metrics["env/number_of_actions/max"] == 3
    assert metrics["env/number_of_actions/min"] == 2
    assert metrics["env/finish_ratio"] == 0.5
    assert metrics["env/number_of_valid_action"] == 2.0
    assert metrics["env/ratio_of_valid_action"] == pytest.approx((2 / 2 + 2 / 3) / 2)
    assert metrics["env/number_of_valid_search"] == 1.0
    assert metrics["env/failed_ratio"] == pytest.approx(1 / 3)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/score/min"] == 0.0


def test_lengths(answered: Trajectory, wandered: Trajectory, failed: Trajectory) -> None:
    wandered.status = Status.LENGTH_LIMIT
    metrics = step_metrics([answered, wandered, failed], None, max_prompt_length=5)
    assert [metrics[f"response_length/{s}"] for s in ("mean", "max", "min")] == [8.0, 9.0, 7.0]
    assert [metrics[f"policy_length/{s}"] for s in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
    assert [metrics[f"prompt_length/{s}"] for s in ("mean", "max", "min")] == [4.0, 5.0, 3.0]
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/clip_ratio"] == 0.5


def test_token_means_are_over_policy_tokens(answered: Trajectory, wandered: Trajectory, batch: TrainBatch) -> None:
    metrics = step_metrics([answered, wandered], batch)
    assert metrics["critic/advantages/mean"] == pytest.approx((5 * 0.6 - 3 * 1.0) / 8, abs=1e-7)
    assert metrics["critic/advantages/max"] == pytest.approx(0.6)
    assert metrics["critic/advantages/min"] == -1.0
    assert metrics["critic/rewards/mean"] == 0.5  # no KL in the reward: the score itself
    assert metrics["state_tokens/total"] == 8
    assert metrics["state_tokens/coverage"] == pytest.approx(8 / 16)
    assert "critic/values/mean" not in metrics


def test_a_row_without_policy_tokens_has_no_response(answered: Trajectory, wandered: Trajectory) -> None:
    batch = TrainBatch.from_trajectories([answered, wandered, answered])
    batch.tokens["loss_mask"][12:24] = False  # as where a trajectory is left out of the losses
    assert step_metrics([answered], batch)["state_tokens/coverage"] == pytest.approx(2 * 5 / (2 * 9))


def test_metrics_of_tokens_are_those_of_plain_numbers() -> None:
    """Rows of random masks against Python's own sums, token by token."""
    generator = torch.Generator().manual_seed(3)
    lengths = [7, 1, 30, 12, 400]
    total = sum(lengths)
    mask_T = torch.rand(total, generator=generator) < 0.4
    advantage_T = torch.randn(total, generator=generator)
    tokens = {"ids": torch.zeros(total, dtype=torch.int64), "loss_mask": mask_T, "advantages": advantage_T}
    batch = TrainBatch(torch.tensor(lengths), tokens, {"reward": torch.tensor([0.1, 0.7, -0.2, 0.3, 0.5])})
    metrics = step_metrics([], batch)
    numbers = [value for value, kept in zip(advantage_T.tolist(), mask_T.tolist(), strict=True) if kept]
    assert metrics["critic/advantages/mean"] == pytest.approx(math.fsum(numbers) / len(numbers), rel=1e-12)
    assert metrics["critic/advantages/max"] == max(numbers)
    assert metrics["critic/advantages/min"] == min(numbers)
    assert metrics["critic/rewards/mean"] == pytest.approx(sum(batch.rows["reward"].tolist()) / 5, rel=1e-12)
    rows, start, num_response = mask_T.tolist(), 0, 0
    for length in lengths:
        row, start = rows[start : start + length], start + length
        num_response += length - row.index(True) if True in row else 0
    assert metrics["state_tokens/coverage"] == sum(rows) / num_response


def test_rewards_after_kl_and_explained_variance(answered: Trajectory, wandered: Trajectory, batch: TrainBatch) -> None:
    mask_T = batch.tokens["loss_mask"]
    batch.tokens["rewards"] = torch.full((24,), -0.1)
    batch.tokens["rewards"][11] = 0.9  # the last token of the first row: 1 - 0.1
    batch.tokens["returns"] = torch.full((24,), 50.0)
    batch.tokens["values"] = torch.full((24,), -50.0)
    batch.tokens["returns"][mask_T] = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0])
    batch.tokens["values"][mask_T] = torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    metrics = step_metrics([answered, wandered], batch)
    assert metrics["critic/rewards/max"] == pytest.approx(0.5)  # 1 - 5 policy tokens x 0.1
    assert metrics["critic/rewards/min"] == pytest.approx(-0.3)
    assert metrics["critic/returns/mean"] == pytest.approx(0.5)
    assert metrics["critic/values/mean"] == pytest.approx(0.375)
    # Var(returns) = 1/4; the error is 1 on one of 8: Var = 1/8 - 1/64 = 7/64; 1 - (7/64) / (1/4) = 9/16
    assert metrics["critic/vf_explained_var"] == pytest.approx(9 / 16, abs=1e-6)


def test_tokens_per_worker_before_and_after_balancing(answered: Trajectory, wandered: Trajectory) -> None:
    batch = TrainBatch.from_trajectories([answered, wandered, answered, wandered])
    batch.lengths_B = torch.tensor([18, 14, 10, 6])
    metrics = step_metrics([answered, wandered], batch, partitions=[[0, 3], [1, 2]])
    assert metrics["global_seqlen/max"] == 32
    assert metrics["global_seqlen/min"] == 16
    assert metrics["global_seqlen/minmax_diff"] == 16
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/balanced_min"] == 24
    assert metrics["global_seqlen/mean"] == 24
    assert "global_seqlen/mean" not in step_metrics([answered, wandered], batch), "of how many ranks?"


def test_time_per_token(answered: Trajectory, wandered: Trajectory, failed: Trajectory, batch: TrainBatch) -> None:
    seconds = {"gen": 0.3, "update_actor": 0.48, "save_checkpoint": 2.0}
    metrics = step_metrics([answered, wandered, failed], batch, seconds=seconds)
    assert metrics["timing_s/gen"] == 0.3
    assert metrics["timing_s/save_checkpoint"] == 2.0
    assert metrics["timing_per_token_ms/gen"] == pytest.approx(20.0)  # 300 ms over 5 + 3 + 7 sampled tokens
    assert metrics["timing_per_token_ms/update_actor"] == pytest.approx(20.0)  # 480 ms over 24 tokens of the batch
    assert "timing_per_token_ms/save_checkpoint" not in metrics


def test_a_step_in_which_all_failed_has_no_means(failed: Trajectory) -> None:
    assert step_metrics([failed], None) == {"env/failed_ratio": 1.0}


def test_a_finished_trajectory_needs_a_reward(answered: Trajectory) -> None:
    answered.reward = None
    with pytest.raises(ValueError, match="no reward"):
        step_metrics([answered], None)


def test_validation_by_source(answered: Trajectory, wandered: Trajectory, failed: Trajectory) -> None:
    metrics = validation_metrics([answered, answered, wandered, failed], prefix="test")
    assert metrics["test/test_score/one"] == 1.0
    assert metrics["test/test_score/two"] == 0.0
    assert metrics["test/test_score/mean"] == pytest.approx(2 / 3)  # over questions, not over sources
    assert metrics["test/num_questions/one"] == 2
    assert metrics["test/num_questions/two"] == 1
    assert metrics["test/num_questions"] == 3
    assert metrics["test/searches_per_question/mean"] == 1.0
    assert metrics["test/finish_ratio/mean"] == pytest.approx(2 / 3)
    assert metrics["test/failed_ratio"] == 0.25


def test_validation_in_which_all_failed(failed: Trajectory) -> None:
    metrics = validation_metrics([failed])
    assert metrics == {"val/num_questions": 0.0, "val/failed_ratio": 1.0}
    assert all(math.isfinite(value) for value in metrics.values())
