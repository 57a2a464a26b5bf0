"""KL between policy p and anchor q per token: sampled estimators, and the exact value over the vocabulary.

With d = l - l_ref at the sampled token and w = exp(-d) (Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html):

    k1 (kl):          d                  expected gradient on policy: zero
    abs:              |d|
    k2 (mse):         d^2 / 2            expected gradient: that of KL(p || q); the value is biased
    k3 (low_var_kl):  w + d - 1          expected gradient: that of KL(q || p)

`full_reverse` sums over the vocabulary, sum_v p_v (log p_v - log q_v), with the gradient through p: exact in value
and gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.algorithms.registry import Registry

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0

SAMPLED_KL: Registry[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = Registry("sampled KL estimator")
EXACT_KL: Registry[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = Registry("exact KL")


@SAMPLED_KL.register("kl", "k1")
def k1(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """d. Inputs and result [T] float; the reference gets no gradient."""
    return log_prob_T - ref_log_prob_T.detach()


@SAMPLED_KL.register("abs")
def absolute(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """|d|. Inputs and result [T] float; the reference gets no gradient."""
    return (log_prob_T - ref_log_prob_T.detach()).abs()


@SAMPLED_KL.register("mse", "k2")
def k2(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """d^2 / 2. Inputs and result [T] float; the reference gets no gradient."""
    return 0.5 * (log_prob_T - ref_log_prob_T.detach()).square()


@SAMPLED_KL.register("low_var_kl", "k3")
def k3(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """exp(-d) + d - 1, with d clamped to +-20 before exp and the result to +-10, as EMA-PG's code does."""
    difference_T = (log_prob_T - ref_log_prob_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-difference_T) + difference_T - 1.0).clamp(-K3_LIMIT, K3_LIMIT)


@EXACT_KL.register("full_reverse")
def full_reverse(logits_TV: torch.Tensor, ref_logits_TV: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token [T] from a chunk of logits [T, V] of each model, already divided by the temperature."""
    log_p_TV = logits_TV.log_softmax(-1)
    log_q_TV = ref_logits_TV.detach().log_softmax(-1)
    return (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
