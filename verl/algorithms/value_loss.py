"""The critic's clipped loss per token.

    loss_t = 0.5 max((V_t - R_t)^2, (clip(V_t, V_old_t - c, V_old_t + c) - R_t)^2)

A value that has moved further than c from where it was, towards its target, gets no more gradient.
Source: the PPO implementation of OpenAI baselines (`ppo2`), described in Engstrom et al. (arXiv 2005.12729), section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """`loss_T` [T] carries gradient; `clipped_T` [T] bool says where the clipped branch was strictly larger."""

    loss_T: Tensor
    clipped_T: Tensor


def value_loss(value_T: Tensor, old_value_T: Tensor, return_T: Tensor, clip: float) -> ValueLoss:
    """The clipped loss of each token. All inputs are [T] float; gradient flows through `value_T` only.

    `clip` > 0 is in units of the return.

    Raises ValueError for a `clip` that is not positive.
    """
    if not clip > 0:
        raise ValueError(f"the clip range of the value loss is {clip}: give a positive number (inf: no clipping)")
    old_value_T, return_T = old_value_T.detach(), return_T.detach()
    free_T = (value_T - return_T).square()
    clipped_T = (value_T.clamp(old_value_T - clip, old_value_T + clip) - return_T).square()
    return ValueLoss(0.5 * torch.maximum(free_T, clipped_T), (clipped_T > free_T).detach())
