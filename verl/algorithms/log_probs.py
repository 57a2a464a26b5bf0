"""What follows from log-probs: ratios of two policies' probabilities, and the entropy of a next-token distribution."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0


def limited(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """The log ratio clamped to +-20, without gradient outside that range."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch(log_ratio_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|d| and exp(d) - 1 - d of each token [N], for d = trainer - sampler in float64; the exponent is clamped to +-20.

    The mean of the second is an unbiased and never negative estimate of KL(sampler || trainer) (k3 of Schulman,
    "Approximating KL divergence", http://joschu.net/blog/kl-approx.html).
    """
    return log_ratio_N.abs(), torch.expm1(limited(log_ratio_N)) - log_ratio_N


def importance_ratio(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio clamped to +-20: finite in every dtype in use, and without gradient outside that range."""
    return limited(log_ratio_T).exp()


def entropy(log_p_TV: torch.Tensor) -> torch.Tensor:
    """H = -sum_v p_v log p_v in nats per token [T], from finite log-probs [T, V]."""
    return -(log_p_TV.exp() * log_p_TV).sum(-1)
