"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch


def entropy(log_p_TV: torch.Tensor) -> torch.Tensor:
    """H = -sum_v p_v log p_v in nats per token [T], from finite log-probs [T, V]."""
    return -(log_p_TV.exp() * log_p_TV).sum(-1)
