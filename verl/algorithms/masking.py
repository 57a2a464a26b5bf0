"""Masked sums over an explicit denominator.

A loss is `sum over trained tokens / denominator`, where the denominator counts the trained tokens of the whole
mini-batch. Summing parts that share one denominator gives the same number however the mini-batch was cut.
"""

from __future__ import annotations

import torch


def masked_sum(value_T: torch.Tensor, mask_T: torch.Tensor, denominator: float = 1.0) -> torch.Tensor:
    """Sum of `value_T` where `mask_T` is true, over `denominator` (> 0). Returns a scalar.

    Unmasked values are replaced, not multiplied by zero, so a NaN or Inf there reaches neither value nor gradient.
    """
    if denominator <= 0:
        raise ValueError(f"denominator is {denominator}: a mean over no token is not defined")
    return torch.where(mask_T, value_T, value_T.new_zeros(())).sum() / denominator


def masked_mean(value_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Mean of `value_T` over the true positions of `mask_T`; raises ValueError when there are none."""
    return masked_sum(value_T, mask_T, float(mask_T.sum()))
