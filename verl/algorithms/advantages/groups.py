"""Sums and baselines over the rows of a group."""

from __future__ import annotations

import torch
from torch import Tensor


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
