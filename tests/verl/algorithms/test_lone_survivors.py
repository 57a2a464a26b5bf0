"""A trajectory whose whole group failed has nothing to compare with: what the retriever did is no gradient."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.algorithms.selection import informative_rows
from verl.algorithms.traits import ESTIMATOR_TRAITS

BY_GROUP = sorted(name for name, traits in ESTIMATOR_TRAITS.items() if traits.compares_group)


def advantages(name: str, rewards: list[float], groups: list[int], lengths: list[int], **settings: str) -> torch.Tensor:
    """[T] of rows with so many tokens, its reward at the last; a row of length 0 has one foreign token."""
    row_T = torch.repeat_interleave(torch.arange(len(rewards)), torch.tensor([max(1, length) for length in lengths]))
    mask_T = torch.tensor([length > 0 for length in lengths])[row_T]
    reward_T = torch.zeros(len(row_T), dtype=torch.float64)
    last_B = torch.tensor([max(1, length) for length in lengths]).cumsum(0) - 1
    reward_T[last_B] = torch.tensor(rewards, dtype=torch.float64)
    return ADVANTAGES[name](
        AdvantageInput(reward_T, mask_T, row_T, torch.tensor(groups)), AdvantageSettings(**settings)
    ).advantage_T


@pytest.mark.parametrize("reward", [1.0, 0.2, -1.0])
@pytest.mark.parametrize("name", BY_GROUP)
def test_the_only_one_left_has_no_advantage_and_changes_no_other(name: str, reward: float) -> None:
    """With the others of its group left out, or there without a token of the policy."""
    whole, groups, lengths = [1.0, 0.0, 0.0, 0.5], [0, 0, 0, 0], [3, 1, 2, 2]
    expected_T = advantages(name, whole, groups, lengths)
    found_T = advantages(name, [*whole, reward], [*groups, 1], [*lengths, 4])
    assert torch.equal(found_T[:8], expected_T) and found_T[8:].tolist() == [0.0] * 4
    found_T = advantages(name, [reward, *whole, 0.0], [1, *groups, 1], [4, *lengths, 0])
    assert torch.equal(found_T[4:12], expected_T) and found_T[[0, 1, 2, 3, 12]].tolist() == [0.0] * 5
    assert advantages(name, [reward], [0], [2]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
def test_by_every_scale_of_grpo(scale: str) -> None:
    """Rewards 1 and 0 have the mean 0.5, and s = sqrt(0.5); that of the lone one does not count."""
    found_T = advantages("grpo", [1.0, 0.0, 9.0], [0, 0, 1], [1, 1, 1], scale=scale)
    divisor = 1.0 if scale == "none" else 0.5**0.5 + 1e-6
    assert found_T.tolist() == pytest.approx([0.5 / divisor, -0.5 / divisor, 0.0], rel=1e-12)
    assert advantages("grpo", [9.0, 3.0], [0, 1], [1, 1], scale=scale).tolist() == [0.0, 0.0]


def test_dynamic_sampling_replaces_such_a_group() -> None:
    reward_B, group_B = torch.tensor([1.0, 0.0, 1.0, 0.5, 0.5]), torch.tensor([0, 0, 1, 2, 2])
    assert informative_rows(reward_B, group_B).tolist() == [True, True, False, False, False]
