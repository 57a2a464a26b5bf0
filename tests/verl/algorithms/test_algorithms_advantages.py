"""GRPO advantages worked out by hand."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.advantages import ADVANTAGES, grpo

# group 0: rewards 1, 0, 0, 1 (mean 1/2, unbiased variance (4 * 1/4) / 3 = 1/3); group 1: 2, 5 (mean 7/2, variance 9/2);
# group 2: a single 0.75
REWARD_B = torch.tensor([1.0, 2.0, 0.0, 0.0, 5.0, 1.0, 0.75], dtype=torch.float64)
GROUP_B = torch.tensor([0, 1, 0, 0, 1, 0, 2])
CENTRED_B = torch.tensor([0.5, -1.5, -0.5, -0.5, 1.5, 0.5, 0.75], dtype=torch.float64)


def test_group_std() -> None:
    small, large = (1 / 3) ** 0.5 + 1e-6, 4.5**0.5 + 1e-6
    divisor_B = torch.tensor([small, large, small, small, large, small, 1 + 1e-6], dtype=torch.float64)
    answer = ADVANTAGES["grpo"](REWARD_B, GROUP_B)
    torch.testing.assert_close(answer.advantage_B, CENTRED_B / divisor_B, atol=1e-12, rtol=0)
    assert answer.batch_std is None


def test_without_division() -> None:
    torch.testing.assert_close(grpo(REWARD_B, GROUP_B, "none").advantage_B, CENTRED_B, atol=1e-12, rtol=0)


def test_batch_std() -> None:
    # sum 0.75, sum of squares 4 * 0.25 + 2 * 2.25 + 0.5625 = 6.0625; variance (6.0625 - 0.75^2 / 7) / 6
    std = ((6.0625 - 0.75**2 / 7) / 6) ** 0.5
    answer = grpo(REWARD_B, GROUP_B, "batch_std")
    assert answer.batch_std is not None and float(answer.batch_std) == pytest.approx(std, rel=1e-12)
    torch.testing.assert_close(answer.advantage_B, CENTRED_B / (std + 1e-6), atol=1e-12, rtol=0)


def test_equal_rewards_give_zero_not_nan() -> None:
    advantage_B = grpo(torch.full((4,), 0.3), torch.zeros(4, dtype=torch.int64)).advantage_B
    assert advantage_B.abs().max() < 1e-1 and advantage_B.isfinite().all()
    assert not grpo(torch.ones(4), torch.zeros(4, dtype=torch.int64)).advantage_B.any()


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown advantage scale 'std'"):
        grpo(REWARD_B, GROUP_B, "std")
    with pytest.raises(ValueError, match="at least two"):
        grpo(REWARD_B[:1], GROUP_B[:1], "batch_std")
    with pytest.raises(KeyError, match="unknown advantage estimator 'gae2'; known: grpo"):
        ADVANTAGES["gae2"]
