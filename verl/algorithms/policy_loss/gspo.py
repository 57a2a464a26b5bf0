"""GSPO: one importance ratio for a whole row (arXiv 2507.18071).

    s_i   = exp(mean over the tokens t of row i of (l_t - l_old_t))
    s_i,t = sg(s_i) exp(l_t - sg(l_t))          sg: no gradient

The clipped surrogate is applied to s_i,t ("GSPO-token"). Its value is that of s_i for every token of the row. With
equal advantages in a row, the gradient of the row's mean loss is that of the sequence objective, so use it with an
aggregation that takes the mean over a row's tokens ("seq-mean-token-mean").
"""

from __future__ import annotations

import torch

from verl.algorithms.aggregation import unit_sums
from verl.algorithms.log_probs import importance_ratio
from verl.algorithms.policy_loss.base import POLICY_LOSSES, Clip, PolicyLoss, clipped_surrogate


@POLICY_LOSSES.register("gspo")
def gspo_loss(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, row_T: torch.Tensor, clip: Clip
) -> PolicyLoss:
    """GSPO-token's clipped loss; bounds are usually far tighter than PPO's. Arguments: see PolicyLossFunction."""
    log_ratio_T = log_prob_T.detach() - old_log_prob_T.detach()
    rows, unit_T = row_T.unique(return_inverse=True)
    length_B = unit_sums(torch.ones_like(log_ratio_T), unit_T, len(rows))
    mean_log_ratio_T = (unit_sums(log_ratio_T, unit_T, len(rows)) / length_B)[unit_T]
    return clipped_surrogate(importance_ratio(mean_log_ratio_T + log_prob_T - log_prob_T.detach()), advantage_T, clip)
