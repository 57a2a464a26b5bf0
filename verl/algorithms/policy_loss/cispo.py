"""CISPO, MiniMax-M1 (arXiv 2506.13585, section 3.1): the clipped ratio is a weight, so every token keeps a gradient.

    loss_t = -sg(clip(rho_t, 1 - low, 1 + high)) A_t l_t,   rho_t = exp(l_t - l_old_t),   sg: no gradient

`low` >= 1 leaves the ratio without a lower bound, as the paper does.
"""

from __future__ import annotations

import torch

from verl.algorithms.log_probs import importance_ratio
from verl.algorithms.policy_loss.base import POLICY_LOSSES, Clip, PolicyLoss


@POLICY_LOSSES.register("cispo")
def cispo_loss(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, row_T: torch.Tensor, clip: Clip
) -> PolicyLoss:
    """CISPO's weighted log-likelihood; rows and `clip.dual` play no part. Arguments: see PolicyLossFunction."""
    ratio_T = importance_ratio((log_prob_T - old_log_prob_T).detach())
    weight_T = ratio_T.clamp(1.0 - clip.low, 1.0 + clip.high)
    return PolicyLoss(-weight_T * advantage_T.detach() * log_prob_T, weight_T != ratio_T)
