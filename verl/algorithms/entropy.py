"""Entropy of the policy's next-token distribution."""

from __future__ import annotations

import torch


def entropy(logits_TV: torch.Tensor) -> torch.Tensor:
    """H(p) = -sum_v p_v log p_v in nats per token [T], from a chunk of logits [T, V] divided by the temperature."""
    log_p_TV = logits_TV.log_softmax(-1)
    return -(log_p_TV.exp() * log_p_TV).sum(-1)
