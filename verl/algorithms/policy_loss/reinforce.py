"""The plain policy gradient (REINFORCE, Williams 1992): loss_t = -A_t l_t.

Unbiased only for the policy that sampled the tokens: one optimizer step for each batch of trajectories.
"""

from __future__ import annotations

import torch

from verl.algorithms.policy_loss.base import POLICY_LOSSES, Clip, PolicyLoss


@POLICY_LOSSES.register("reinforce")
def reinforce_loss(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, row_T: torch.Tensor, clip: Clip
) -> PolicyLoss:
    """Advantage-weighted log-likelihood; only the first and third argument play a part (see PolicyLossFunction)."""
    return PolicyLoss(-advantage_T.detach() * log_prob_T, torch.zeros_like(log_prob_T, dtype=torch.bool))
