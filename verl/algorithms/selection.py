"""Which trajectories are worth training on (dynamic sampling of DAPO, arXiv 2503.14476)."""

from __future__ import annotations

import torch


def zero_variance_groups(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """True for groups whose rewards are all equal, [G] bool with G = largest group number + 1.

    `reward_B` [B] float, `group_B` [B] int64 from 0. Such a group has no group-relative advantage. A group of one is
    not among them (there is nothing to be equal to), nor is a number that no row has.
    """
    equal_G = _equal_rewards(reward_B, group_B)
    return equal_G & (group_B.bincount(minlength=len(equal_G)) > 1)


def informative_rows(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """True for rows of groups with two different rewards, [B] bool: what DAPO's dynamic sampling keeps.

    A trajectory that is alone in its group, since the others failed, has no advantage either and is not among them.
    """
    return ~_equal_rewards(reward_B, group_B)[group_B]


def _equal_rewards(reward_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """True for groups without two different rewards, [G] bool, also for those of one row or none."""
    empty_G = reward_B.new_zeros(int(group_B.max()) + 1 if len(group_B) else 0)
    low_G = empty_G.scatter_reduce(0, group_B, reward_B, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, group_B, reward_B, "amax", include_self=False)
    return low_G == high_G
