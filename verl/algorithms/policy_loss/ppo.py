"""PPO: the clipped surrogate on each token's ratio rho_t = exp(l_t - l_old_t). Formulas: see base.py."""

from __future__ import annotations

import torch

from verl.algorithms.log_probs import importance_ratio
from verl.algorithms.policy_loss.base import POLICY_LOSSES, Clip, PolicyLoss, clipped_surrogate


@POLICY_LOSSES.register("ppo")
def ppo_loss(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, row_T: torch.Tensor, clip: Clip
) -> PolicyLoss:
    """PPO's clipped loss, optionally with the dual bound; rows play no part. Arguments: see PolicyLossFunction."""
    return clipped_surrogate(importance_ratio(log_prob_T - old_log_prob_T.detach()), advantage_T, clip)
