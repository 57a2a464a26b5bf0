"""Group-relative advantages (GRPO).

For a trajectory i of group g (the trajectories of one prompt) with reward R_i, mean mu_g and unbiased std sigma_g:

    scale "group_std":  A_i = (R_i - mu_g) / (sigma_g + 1e-6)
    scale "none":       A_i =  R_i - mu_g
    scale "batch_std":  A_i = (R_i - mu_g) / (s + 1e-6),  s = unbiased std over the batch of (R_j - mu_g(j))

A group of one has no mean to compare with: mu_g = 0 and sigma_g = 1, so its advantage is its reward.
Sources: GRPO, DeepSeekMath (arXiv 2402.03300) eq. 4; "none" is Dr. GRPO (arXiv 2503.20783);
"batch_std" is EMA-PG (arXiv 2602.04417), which also divides the KL loss by s + 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from verl.algorithms.registry import Registry

EPSILON = 1e-6


class Advantages(NamedTuple):
    """`advantage_B` [B] in the reward's dtype; `batch_std` is a scalar, present for the scale "batch_std" only."""

    advantage_B: torch.Tensor
    batch_std: torch.Tensor | None


ADVANTAGES: Registry[Callable[..., Advantages]] = Registry("advantage estimator")


@ADVANTAGES.register("grpo")
def grpo(reward_B: torch.Tensor, group_B: torch.Tensor, scale: str = "group_std") -> Advantages:
    """GRPO advantages of `reward_B` [B] float; `group_B` [B] int64 holds group numbers from 0. Formulas: see module.

    Raises ValueError for a scale that does not exist and for "batch_std" with fewer than two rows.
    """
    num_B = reward_B.new_zeros(_num_groups(group_B)).index_add(0, group_B, torch.ones_like(reward_B))
    alone_B = (num_B == 1)[group_B]
    mean_B = (torch.zeros_like(num_B).index_add(0, group_B, reward_B) / num_B.clamp(min=1))[group_B]
    centred_B = reward_B - torch.where(alone_B, torch.zeros_like(mean_B), mean_B)
    if scale == "none":
        return Advantages(centred_B, None)
    if scale == "group_std":
        squares = torch.zeros_like(num_B).index_add(0, group_B, centred_B.square())
        std_B = (squares / (num_B - 1).clamp(min=1)).sqrt()[group_B]
        std_B = torch.where(alone_B, torch.ones_like(std_B), std_B)
        return Advantages(centred_B / (std_B + EPSILON), None)
    if scale == "batch_std":
        if len(reward_B) < 2:
            raise ValueError("the std over a batch needs at least two trajectories")
        batch_std = centred_B.std()
        return Advantages(centred_B / (batch_std + EPSILON), batch_std)
    raise ValueError(f"unknown advantage scale '{scale}'; known: group_std, none, batch_std")


def _num_groups(group_B: torch.Tensor) -> int:
    return int(group_B.max()) + 1 if len(group_B) else 0
