"""What every policy loss takes and returns, and the clipped surrogate that PPO applies to token ratios and GSPO to
sequence ratios.

    loss = max(-A rho, -A clip(rho, 1 - low, 1 + high))         Schulman et al., arXiv 1707.06347, eq. 7
    loss = min(loss, -A c) where A < 0, if a dual bound c is given

Separate bounds are DAPO's "clip-higher" (arXiv 2503.14476). The dual bound (arXiv 1912.09729) stops a negative
advantage from giving an unbounded loss when rho is large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from verl.algorithms.registry import Registry


class Clip(NamedTuple):
    """Bounds of an importance ratio: 1 - low, 1 + high, and `dual` > 1 for a negative advantage (None: off)."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None


class PolicyLoss(NamedTuple):
    """`loss_T` [T] carries gradient; `clipped_T` [T] bool says where a bound changed the loss or its weight."""

    loss_T: torch.Tensor
    clipped_T: torch.Tensor


PolicyLossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Clip], PolicyLoss]
"""(log_prob_T, old_log_prob_T, advantage_T, row_T, clip) -> PolicyLoss, for the policy's tokens only.

The first three are [T] float, `row_T` [T] int64 is the row of each token. A row is never split over two calls.
Gradient flows through `log_prob_T` only.
"""

POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("policy loss")


def clipped_surrogate(ratio_T: torch.Tensor, advantage_T: torch.Tensor, clip: Clip) -> PolicyLoss:
    """Loss [T] for `ratio_T` [T] with gradient; raises ValueError for a dual bound of at most 1."""
    if clip.dual is not None and clip.dual <= 1.0:
        raise ValueError(f"dual clip is {clip.dual}: the bound on the ratio must be above 1 (3 is usual), or None")
    advantage_T = advantage_T.detach()
    free_T = -advantage_T * ratio_T
    loss_T = torch.maximum(free_T, -advantage_T * ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high))
    if clip.dual is not None:
        loss_T = torch.where(advantage_T < 0, torch.minimum(loss_T, -advantage_T * clip.dual), loss_T)
    return PolicyLoss(loss_T, (loss_T != free_T).detach())
