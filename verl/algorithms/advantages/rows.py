"""What the estimators share: one reward a row from token rewards and back to tokens; sums, baselines and divisors over
the rows of a group; whitening over tokens; discounted sums within a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantages.inputs import EPSILON, AdvantageInput


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: for each row, the sum of `value_B` over its group, itself included."""
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    return value_B.new_zeros(num_groups).index_add(0, group_B, value_B)[group_B]


def group_size(value_B: Tensor, group_B: Tensor) -> Tensor:
    """[B] in the dtype of `value_B`: how many rows the group of each row has, itself included."""
    return group_sum(torch.ones_like(value_B), group_B)


def centred(reward_B: Tensor, group_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """[B]: R_i minus its group's (weighted) mean.

    Equal rewards give exactly 0: the mean is taken of what is above the group's lowest reward, which is then 0.
    """
    weight_B = torch.ones_like(reward_B) if weight_B is None else weight_B
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    lowest_G = reward_B.new_zeros(num_groups).scatter_reduce(0, group_B, reward_B, "amin", include_self=False)
    above_B = reward_B - lowest_G[group_B]
    return above_B - group_sum(weight_B * above_B, group_B) / group_sum(weight_B, group_B)


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


WHITENING_EPSILON = 1e-8  # as veRL has it, inside the square root


def over_group_std(centred_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: c_i / (sigma_g + 1e-6), sigma_g the unbiased std of the group, which has two rows or more."""
    variance_B = group_sum(centred_B.square(), group_B) / (group_size(centred_B, group_B) - 1)
    return centred_B / (variance_B.sqrt() + EPSILON)


def over_batch_std(centred_B: Tensor) -> tuple[Tensor, Tensor]:
    """[B] and scalar: c_i / `batch_divisor(s)` and s, the unbiased std over all rows.

    Without a row s is 0. Raises ValueError for a single one.
    """
    if len(centred_B) == 0:
        return centred_B, centred_B.new_zeros(())
    if len(centred_B) < 2:
        raise ValueError(
            f"the std over a batch needs at least two trajectories with policy tokens, not {len(centred_B)}: "
            'take more of them, or the scale "none"'
        )
    batch_std = centred_B.std()
    return centred_B / batch_divisor(batch_std), batch_std


def batch_divisor(batch_std: Tensor) -> Tensor:
    """The divisor of a batch's advantages, and of its KL loss, for their std s = `batch_std`: s + 1e-6, or 1 if s is 0.

    Without a deviation there is no scale to take out: the advantages are 0 whatever divides them, and the KL would be
    multiplied by a million.
    """
    return torch.where(batch_std > 0, batch_std + EPSILON, 1.0)


def whitened(value_N: Tensor) -> Tensor:
    """[N]: (x - mean) / sqrt(var + 1e-8), var unbiased; a single value becomes 0, and so do equal ones, exactly."""
    if len(value_N) < 2:
        return torch.zeros_like(value_N)
    above_N = value_N.double() - value_N.min()
    return ((above_N - above_N.mean()) * (above_N.var() + WHITENING_EPSILON).rsqrt()).to(value_N.dtype)


def discounted_sum(value_N: Tensor, row_N: Tensor, factor: float) -> Tensor:
    """[N]: S_t = sum_{k>=0} factor^k x_{t+k} over the entries of t's row; `row_N` int64 never decreases.

    By doubling: if S covers the next s entries, then S_t + factor^s S_{t+s} covers 2 s. It takes log2(longest row)
    steps over all rows at once.
    """
    total_N, stride = value_N, 1
    while stride < len(total_N):
        same_row_N = row_N[stride:] == row_N[:-stride]
        if not same_row_N.any():
            break
        later_N = torch.where(same_row_N, factor**stride * total_N[stride:], 0.0)
        total_N = torch.cat([total_N[:-stride] + later_N, total_N[-stride:]])
        stride *= 2
    return total_N


def following(value_N: Tensor, row_N: Tensor) -> Tensor:
    """[N]: the value at the next entry of the same row, 0 at a row's last."""
    next_N = torch.where(row_N[1:] == row_N[:-1], value_N[1:], 0.0)
    return torch.cat([next_N, value_N.new_zeros(min(1, len(value_N)))])
