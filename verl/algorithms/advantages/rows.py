"""From token rewards to one reward a row, and from one advantage a row back to its tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_size
from verl.algorithms.advantages.inputs import AdvantageInput


class PolicyRows(NamedTuple):
    """The rows that take part in a comparison, renumbered from 0; each has policy tokens."""

    reward_B: Tensor
    """[B] float64: R_i, the sum of the row's token rewards over its policy tokens."""
    length_B: Tensor
    """[B] float64: number of policy tokens, at least 1."""
    group_B: Tensor
    """[B] int64."""
    row_N: Tensor
    """[N] int64: row (in the new numbers) of each of their policy tokens."""
    mask_T: Tensor
    """[T] bool: where those tokens are in the batch."""


def policy_rows(inputs: AdvantageInput) -> PolicyRows:
    """Sum `inputs.reward_T` over the policy tokens of each row that has any.

    In float64: what a mean of float32 rewards loses to rounding would be divided by a std that is no larger.
    """
    return _rows(inputs, inputs.mask_T)


def compared_rows(inputs: AdvantageInput) -> PolicyRows:
    """`policy_rows` without those that are alone in their group, since the others failed or have no policy tokens.

    They have nothing to compare with. Their own reward as advantage would make a gradient of the others' failure.
    """
    rows = policy_rows(inputs)
    compared_B = group_size(rows.reward_B, rows.group_B) > 1
    if bool(compared_B.all()):
        return rows
    return _rows(inputs, inputs.mask_T.masked_scatter(inputs.mask_T, compared_B[rows.row_N]))


def _rows(inputs: AdvantageInput, mask_T: Tensor) -> PolicyRows:
    reward_N = inputs.reward_T[mask_T].double()
    row_B, row_N, length_B = torch.unique_consecutive(inputs.row_T[mask_T], return_inverse=True, return_counts=True)
    reward_B = reward_N.new_zeros(len(row_B)).index_add(0, row_N, reward_N)
    return PolicyRows(reward_B, length_B.to(reward_B.dtype), inputs.group_B[row_B], row_N, mask_T)


def scattered(value_N: Tensor, mask_T: Tensor) -> Tensor:
    """[T]: `value_N` at the true positions of `mask_T`, 0 elsewhere."""
    return value_N.new_zeros(len(mask_T)).masked_scatter(mask_T, value_N)


def spread(value_B: Tensor, rows: PolicyRows, inputs: AdvantageInput) -> Tensor:
    """[T] in the reward's dtype: each row's value at all its policy tokens, 0 elsewhere."""
    return scattered(value_B.to(inputs.reward_T.dtype)[rows.row_N], rows.mask_T)
