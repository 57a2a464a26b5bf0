"""What every policy loss takes and returns."""

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
