"""KL estimates from the log-prob of the sampled token alone.

With d = l - l_ref, w = exp(-d) and r = exp(l - sg l), which is 1 with the gradient of l (sg: no gradient):

    name              value                        expected gradient when the token is drawn from p
    kl, k1            d                            zero
    abs               |d|                          that of no divergence
    mse, k2           d^2 / 2                      that of KL(p || q); the value is biased
    low_var_kl, k3    w + d - 1                    that of KL(q || p), though the value is KL(p || q)
    k3plusplus        r (w + d - 1)                that of KL(p || q)
    k4                r sg(d)                      that of KL(p || q)
    k5                -sg(w) d + (l - sg l)        that of KL(q || p), and the value is KL(q || p)

k1 to k3: Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html; the others as in EMA-PG.
A name with "+" after it has the value of that estimator and the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from verl.algorithms.log_probs import limited
from verl.algorithms.registry import Registry

K3_LIMIT = 10.0

SampledKL = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

SAMPLED_KL: Registry[SampledKL] = Registry("sampled KL estimator")


def sampled_kl(name: str) -> SampledKL:
    """The estimator of that name, with or without "+"; raises ValueError with the known names for any other."""
    plain = name.removesuffix("+")
    if plain not in SAMPLED_KL:
        known = ", ".join(SAMPLED_KL)
        raise ValueError(f"unknown sampled KL estimator '{name}'; use one of {known}, or one of these followed by '+'")
    return SAMPLED_KL[plain] if plain == name else partial(_straight_through, SAMPLED_KL[plain])


@SAMPLED_KL.register("kl", "k1")
def k1(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """d. Inputs and result [T] float; the reference gets no gradient, here and below."""
    return log_prob_T - ref_log_prob_T.detach()


@SAMPLED_KL.register("abs")
def absolute(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """|d|."""
    return k1(log_prob_T, ref_log_prob_T).abs()


@SAMPLED_KL.register("mse", "k2")
def k2(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """d^2 / 2."""
    return 0.5 * k1(log_prob_T, ref_log_prob_T).square()


@SAMPLED_KL.register("low_var_kl", "k3")
def k3(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """w + d - 1, with d clamped to +-20 and the result to +-10; no gradient where a clamp acts."""
    difference_T = limited(k1(log_prob_T, ref_log_prob_T))
    return (torch.exp(-difference_T) + difference_T - 1.0).clamp(-K3_LIMIT, K3_LIMIT)


@SAMPLED_KL.register("k3plusplus")
def k3plusplus(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """r k3, with the gradient through both factors and the clamps of k3."""
    return _unit(log_prob_T) * k3(log_prob_T, ref_log_prob_T)


@SAMPLED_KL.register("k4")
def k4(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """r sg(d)."""
    return _unit(log_prob_T) * k1(log_prob_T, ref_log_prob_T).detach()


@SAMPLED_KL.register("k5")
def k5(log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """-sg(w) d + (l - sg l), with d clamped to +-20 in both places."""
    log_weight_T = -limited(k1(log_prob_T, ref_log_prob_T))
    return log_weight_T.detach().exp() * log_weight_T + (log_prob_T - log_prob_T.detach())


def _straight_through(estimator: SampledKL, log_prob_T: torch.Tensor, ref_log_prob_T: torch.Tensor) -> torch.Tensor:
    """The value of `estimator` with the gradient of k2."""
    surrogate_T = k2(log_prob_T, ref_log_prob_T)
    return estimator(log_prob_T, ref_log_prob_T).detach() + (surrogate_T - surrogate_T.detach())


def _unit(log_prob_T: torch.Tensor) -> torch.Tensor:
    """[T]: ones that have the gradient of the log-prob."""
    return (log_prob_T - log_prob_T.detach()).exp()


SAMPLED_KL_NAMES: tuple[str, ...] = (*SAMPLED_KL, *(f"{name}+" for name in SAMPLED_KL))
