"""The anchor follows the policy as an exponential moving average of its weights.

    theta_anchor <- tau theta_anchor + (1 - tau) theta_policy

written as theta_anchor += (1 - tau) (theta_policy - theta_anchor), so that equal weights stay equal to the last bit.
tau = 1 freezes the anchor, tau = 0 copies the policy. Source: EMA-PG (arXiv 2602.04417). Keep both in float32:
the increments are far below half a bfloat16 step, and a bfloat16 average does not move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def follow(anchor: Sequence[torch.Tensor], policy: Sequence[torch.Tensor], tau: float) -> None:
    """Move the `anchor` tensors towards the `policy` tensors in place; equal shapes, 0 <= tau <= 1."""
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"tau is {tau}: it must lie between 0 (copy the policy) and 1 (frozen)")
    if len(anchor) != len(policy):
        raise ValueError(f"anchor has {len(anchor)} tensors, policy has {len(policy)}")
    if tau < 1.0:
        # Private, like all `_foreach` functions: one call for all tensors, with few kernels on a GPU.
        torch._foreach_lerp_(list(anchor), list(policy), 1.0 - tau)
