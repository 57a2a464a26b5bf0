"""The weight that makes a KL estimate right when the token was drawn from another policy mu, such as an older one."""

from __future__ import annotations

import torch

from verl.algorithms.log_probs import importance_ratio


def importance_weight(
    log_prob_T: torch.Tensor, sampler_log_prob_T: torch.Tensor, lower: float | None = None, upper: float | None = None
) -> torch.Tensor:
    """p / mu at the sampled token, [T] without gradient: exp(clamp(l - l_mu, +-20)), then kept in [lower, upper].

    Without bounds the weighted estimate has the expectation it has on policy; bounds trade bias for variance. Large
    weights are rare, because the mean of p / mu under mu is 1: at most one token in c has a weight of c or more.
    Raises ValueError when `lower` is above `upper`.
    """
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"importance weight: the lower bound {lower} is above the upper bound {upper}; swap them")
    weight_T = importance_ratio((log_prob_T - sampler_log_prob_T).detach())
    return weight_T if lower is None and upper is None else weight_T.clamp(lower, upper)
