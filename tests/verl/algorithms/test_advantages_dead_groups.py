"""Equal rewards give advantages of exactly zero, in the precision that a run has: there is nothing to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings

# What each estimator compares: the rows of a group or those of the batch.
COMPARING = [
    *(("grpo", scale) for scale in ("group_std", "none", "batch_std")),
    *(("reinforce", scale) for scale in ("none", "batch_std")),
    *((name, "none") for name in ("rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")),
]
REWARDS = (0.8, 0.1, 0.7, 1 / 3, -0.3, 123.456, 1e-6)


def outcomes(rewards: Sequence[float], groups: Sequence[int], dtype: torch.dtype = torch.float32) -> AdvantageInput:
    """Rows of two environment tokens and 1, 2 or 3 policy tokens; the reward lies at the last one."""
    tokens = [
        (row, policy, reward if last else 0.0)
        for row, reward in enumerate(rewards)
        for policy, last in [(False, False), (False, False), *((True, i == row % 3) for i in range(row % 3 + 1))]
    ]
    return AdvantageInput(
        reward_T=torch.tensor([reward for _, _, reward in tokens], dtype=dtype),
        mask_T=torch.tensor([policy for _, policy, _ in tokens]),
        row_T=torch.tensor([row for row, _, _ in tokens]),
        group_B=torch.tensor(groups),
    )


def advantages(name: str, given: AdvantageInput, scale: str = "none") -> Tensor:
    found = ADVANTAGES[name](given, AdvantageSettings(scale=scale)).advantage_T
    assert found.dtype == given.reward_T.dtype
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "scale"), COMPARING)
def test_equal_rewards_give_no_advantage(name: str, scale: str, dtype: torch.dtype) -> None:
    for reward in REWARDS:
        for n in range(2, 34):
            found_T = advantages(name, outcomes([reward] * n, [0] * n, dtype), scale)
            assert not found_T.any(), f"{n} rewards of {reward}: {found_T.abs().max()}"


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize("scale", ["group_std", "none", "batch_std"])
def test_a_dead_group_beside_a_living_one(name: str, scale: str) -> None:
    given = outcomes([0.8] * 8 + [0.0, 1.0, 0.8] + [0.1] * 16, [0] * 8 + [1] * 3 + [2] * 16)
    found_T = advantages(name, given, scale)
    group_T = given.group_B[given.row_T]
    assert not found_T[group_T != 1].any() and found_T[(group_T == 1) & given.mask_T].all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_rows_that_take_no_part_leave_equal_rewards_equal(name: str) -> None:
    """Row 2 has no policy token (what is left of a failed trajectory); with two others it is a group of 0.8."""
    given = outcomes([0.8, 0.8, 0.3, 0.8], [0, 0, 0, 0])
    assert not advantages(name, replace(given, mask_T=given.mask_T & (given.row_T != 2)), "group_std").any()


def test_the_greedy_answers_reward_is_no_advantage_over_itself() -> None:
    given = replace(outcomes(REWARDS, range(len(REWARDS))), baseline_B=torch.tensor(REWARDS))
    assert not advantages("remax", given).any()


def test_a_critic_that_knows_the_reward_leaves_no_advantage() -> None:
    given = outcomes([0.8] * 6, range(6))
    assert not advantages("gae", replace(given, value_T=torch.full_like(given.reward_T, 0.8))).any()


@pytest.mark.parametrize("n", [3, 5, 8, 16])
def test_nearly_equal_rewards_are_centred_as_exactly_as_they_are_given(n: int) -> None:
    """One reward is one float32 step higher. Exact rational arithmetic says what the centred rewards are."""
    base = torch.tensor(0.8)
    rewards = [float(base)] * (n - 1) + [float(torch.nextafter(base, torch.tensor(1.0)))]
    exact = [Fraction(reward) for reward in rewards]
    expected = torch.tensor([float(reward - sum(exact) / n) for reward in exact])
    found_T = advantages("grpo", given := outcomes(rewards, [0] * n))
    last_T = torch.cat([given.row_T.diff() != 0, torch.tensor([True])])
    torch.testing.assert_close(found_T[last_T], expected, atol=0, rtol=1e-6)
