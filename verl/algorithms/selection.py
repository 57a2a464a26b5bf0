"""Which trajectories are worth training on (dynamic sampling of DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import torch


def zero_variance_groups(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """True for groups whose rewards are all equal, [G] bool with G = largest group number + 1.

    `reward_B` [B] float, `group_B` [B] int64 from 0. Such a group has no group-relative advantage. A group of one is
    not among them (there is nothing to be equal to), nor is a number that no row has.
    """
    num_groups = int(group_B.max()) + 1 if len(group_B) else 0
    empty_G = reward_B.new_zeros(num_groups)
    low_G = empty_G.scatter_reduce(0, group_B, reward_B, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, group_B, reward_B, "amax", include_self=False)
    return (low_G == high_G) & (group_B.bincount(minlength=num_groups) > 1)


def informative_rows(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """True for rows of groups that are not zero-variance, [B] bool: what DAPO's dynamic sampling keeps."""
    return ~zero_variance_groups(reward_B, group_B)[group_B]
