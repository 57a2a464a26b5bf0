"""From token rewards to one reward a row, and from one advantage a row back to its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantages.inputs import AdvantageInput


class PolicyRows(NamedTuple):
    """The rows that have policy tokens, renumbered from 0; the other rows take no part in any comparison."""

    reward_B: Tensor
    """[B] float64: R_i, the sum of the row's token rewards over its policy tokens."""
    length_B: Tensor
    """[B] float64: number of policy tokens, at least 1."""
    group_B: Tensor
    """[B] int64."""
    row_N: Tensor
    """[N] int64: row (in the new numbers) of each policy token."""


def policy_rows(inputs: AdvantageInput) -> PolicyRows:
    """Sum `inputs.reward_T` over the policy tokens of each row that has any.

    In float64: what a mean of float32 rewards loses to rounding would be divided by a std that is no larger.
    """
    reward_N = inputs.reward_T[inputs.mask_T].double()
    row_B, row_N, length_B = torch.unique_consecutive(
        inputs.row_T[inputs.mask_T], return_inverse=True, return_counts=True
    )
    reward_B = reward_N.new_zeros(len(row_B)).index_add(0, row_N, reward_N)
    return PolicyRows(reward_B, length_B.to(reward_B.dtype), inputs.group_B[row_B], row_N)


def scattered(value_N: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: `value_N` at the true positions of `mask_T`, 0 elsewhere."""
    return value_N.new_zeros(len(mask_T)).masked_scatter(mask_T, value_N)


def spread(value_B: Tensor, rows: PolicyRows, inputs: AdvantageInput) -> Tensor:
    """[T] in the reward's dtype: each row's value at all its policy tokens, 0 elsewhere."""
    return scattered(value_B.to(inputs.reward_T.dtype)[rows.row_N], inputs.mask_T)
