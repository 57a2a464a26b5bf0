"""Divisors for centred rewards, and whitening over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.algorithms.advantages.groups import group_size, group_sum
from verl.algorithms.advantages.inputs import EPSILON

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
