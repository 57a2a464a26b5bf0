"""Policy losses per token.

PPO clip (Schulman et al., arXiv 1707.06347, eq. 7) with separate sides ("clip-higher", DAPO, arXiv 2503.14476):

    rho_t  = exp(l_t - l_old_t)
    loss_t = max(-A_t rho_t, -A_t clip(rho_t, 1 - low, 1 + high))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from verl.algorithms.registry import Registry


class PolicyLoss(NamedTuple):
    """`loss_T` [T] carries gradient; `clipped_T` [T] bool says where the clipped branch was strictly larger."""

    loss_T: torch.Tensor
    clipped_T: torch.Tensor


POLICY_LOSSES: Registry[Callable[..., PolicyLoss]] = Registry("policy loss")


@POLICY_LOSSES.register("ppo")
def ppo_clip(
    log_prob_T: torch.Tensor,
    old_log_prob_T: torch.Tensor,
    advantage_T: torch.Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """PPO's clipped loss per token; all inputs [T] float, gradient flows through `log_prob_T` only."""
    ratio_T = (log_prob_T - old_log_prob_T.detach()).exp()
    advantage_T = advantage_T.detach()
    free_T = -advantage_T * ratio_T
    clipped_T = -advantage_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(torch.maximum(free_T, clipped_T), (clipped_T > free_T).detach())
