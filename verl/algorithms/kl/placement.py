"""KL as a cost per token, taken off rewards before the advantages are estimated, or off advantages afterwards.

reward_t    <- reward_t - beta kl_t                            (Ouyang et al., arXiv 2203.02155, eq. 2)
advantage_t <- advantage_t - beta kl_t                         KL after the advantage (EMA-PG)
advantage_t <- advantage_t - beta sum_{s >= t} kl_s            the same, with the KL still to come (EMA-PG)
"""

from __future__ import annotations

import torch


def penalised_rewards(reward_T: torch.Tensor, kl_T: torch.Tensor, mask_T: torch.Tensor, beta: float) -> torch.Tensor:
    """Rewards (or advantages) [T] less beta times the KL where `mask_T` is true; elsewhere as they were.

    The KL is a constant here; what it holds outside the mask is never read.
    """
    return torch.where(mask_T, reward_T - beta * kl_T.detach(), reward_T)


def kl_to_go(kl_T: torch.Tensor, mask_T: torch.Tensor, row_T: torch.Tensor) -> torch.Tensor:
    """Sum of the masked KL from each token to the end of its row, [T]; `row_T` int64 [T] is the row of each token.

    Raises ValueError when the tokens of a row do not follow each other in row order.
    """
    if bool((row_T[1:] < row_T[:-1]).any()):
        raise ValueError("kl_to_go: row_T goes down; pass the tokens row after row")
    # float64, as one running sum goes over all rows and each row's part is a difference of two of its values
    masked_T = torch.where(mask_T, kl_T.detach(), kl_T.new_zeros(())).double()
    before_T = masked_T.cumsum(0) - masked_T
    _, length_B = row_T.unique_consecutive(return_counts=True)
    total_B = torch.cat([before_T, masked_T.sum(0, keepdim=True)])[length_B.cumsum(0)]
    return (total_B.repeat_interleave(length_B) - before_T).to(kl_T.dtype)
