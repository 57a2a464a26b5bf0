"""Exact KL over the vocabulary, with its gradient in closed form for heads that write their own backward.

For p = softmax(z) and a constant q, by differentiating the definitions:

    full_reverse   KL(p || q) = sum_v p_v (log p_v - log q_v)     d / d z_v = p_v (log p_v - log q_v - KL)
    full_forward   KL(q || p) = sum_v q_v (log q_v - log p_v)     d / d z_v = p_v - q_v
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class ExactKL(NamedTuple):
    """One direction of the KL, from finite log-probs p and q [T, V] in nats.

    value: (log_p_TV, log_q_TV) -> kl_T.
    logit_gradient: (log_p_TV, log_q_TV, kl_T) -> a new [T, V], d kl_t / d z_tv where log_p = log_softmax(z).
    """

    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    logit_gradient: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _divergence(log_p_TV: torch.Tensor, log_q_TV: torch.Tensor) -> torch.Tensor:
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)


EXACT_KL: Mapping[str, ExactKL] = {
    "full_reverse": ExactKL(
        value=lambda log_p_TV, log_q_TV: _divergence(log_p_TV, log_q_TV.detach()),
        logit_gradient=lambda log_p_TV, log_q_TV, kl_T: (
            (log_p_TV - log_q_TV).sub_(kl_T.unsqueeze(-1)).mul_(log_p_TV.exp())
        ),
    ),
    "full_forward": ExactKL(
        value=lambda log_p_TV, log_q_TV: _divergence(log_q_TV.detach(), log_p_TV),
        logit_gradient=lambda log_p_TV, log_q_TV, kl_T: log_p_TV.exp().sub_(log_q_TV.exp()),
    ),
}
