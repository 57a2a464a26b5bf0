"""Ratios of two policies' probabilities, from the difference of their log-probs."""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0


def limited(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """The log ratio clamped to +-20, without gradient outside that range."""
    return log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance_ratio(log_ratio_T: torch.Tensor) -> torch.Tensor:
    """exp of a log ratio clamped to +-20: finite in every dtype in use, and without gradient outside that range."""
    return limited(log_ratio_T).exp()
