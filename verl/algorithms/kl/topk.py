"""Top-k KL: exact over a set S of k tokens (the head), sampled over the rest (the tail).

With d_j = log p_j - log q_j, true probabilities (not renormalised over S) and the sampled token y, as in EMA-PG:

    reverse   L1 = sum_{j in S} p_j d_j      L2 = 1[y not in S] k4(y)     value: KL(p || q)
    forward   L1 = -sum_{j in S} q_j d_j     L2 = 1[y not in S] k5(y)     value: KL(q || p)
    kl = L1 + s L2                           s: weight of the tail (1 on policy)

The gradient of L1 as published keeps a term that cancels only if S is the whole vocabulary, because sum_S grad p_j is
the gradient of the head's mass M_S, which is not zero. So, with y drawn from p (or from p_old, with s = p / p_old),

    published   reverse: grad KL + grad M_S       forward: grad KL - grad M_S
    corrected   grad KL, both ways: L1 - (M_S - sg M_S) for reverse, L1 + (M_S - sg M_S) for forward

The correction has no value and no variance: L1, L2 and kl keep their values. S may not depend on y.

Without the tail, the corrected gradient is that of the KL of masses that need not sum to 1,

    reverse   sum_S (p_j d_j - p_j + q_j)         forward   sum_S (p_j - q_j - q_j d_j)

which is at least 0, and 0 only at p = q on S. The truncated KL itself (published) can be negative and pulls a policy
away from q even at p = q. docs/topk_kl.md derives all this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from verl.algorithms.kl.sampled import SampledKL, k4, k5

TopkGradient = Literal["corrected", "published"]


@dataclass(frozen=True)
class TopkKL:
    """One direction of the top-k KL: `tail` estimates it outside S; `mass_sign` is that of M_S in the correction."""

    forward: bool
    tail: SampledKL
    mass_sign: float

    def __call__(
        self,
        log_p_Tk: torch.Tensor,
        log_q_Tk: torch.Tensor,
        log_prob_T: torch.Tensor,
        ref_log_prob_T: torch.Tensor,
        sampled_in_S_T: torch.Tensor,
        *,
        gradient: TopkGradient = "corrected",
        tail: bool = True,
        weight_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Estimate of the KL per token [T], in nats.

        `log_p_Tk`, `log_q_Tk`: log-probs at the tokens of S [T, k]; `log_prob_T`, `ref_log_prob_T`: at the sampled
        token; `sampled_in_S_T`: bool [T]; `weight_T`: detached [T] weight of the tail, None: 1. p gets gradient, q
        none. Raises ValueError for shapes that do not belong together or an unknown `gradient`.
        """
        _check(log_p_Tk, log_q_Tk, log_prob_T, gradient)
        # The head, exact over S.
        p_Tk, difference_Tk = log_p_Tk.exp(), log_p_Tk - log_q_Tk.detach()
        head_T = (-log_q_Tk.detach().exp() * difference_Tk if self.forward else p_Tk * difference_Tk).sum(-1)
        if gradient == "corrected":
            mass_T = p_Tk.sum(-1)
            head_T = head_T + self.mass_sign * (mass_T - mass_T.detach())  # has a gradient, but no value
        if not tail:
            return head_T
        # The tail has a value only where the sampled token is not in S.
        tail_T = self.tail(log_prob_T, ref_log_prob_T)
        if weight_T is not None:
            tail_T = weight_T.detach() * tail_T
        return head_T + torch.where(sampled_in_S_T, tail_T.new_zeros(()), tail_T)


topk_reverse = TopkKL(forward=False, tail=k4, mass_sign=-1.0)
topk_forward = TopkKL(forward=True, tail=k5, mass_sign=1.0)
TOPK_KL: Mapping[str, TopkKL] = {"full_reverse": topk_reverse, "full_forward": topk_forward}


def _check(log_p_Tk: torch.Tensor, log_q_Tk: torch.Tensor, log_prob_T: torch.Tensor, gradient: str) -> None:
    if gradient not in get_args(TopkGradient):
        raise ValueError(f"unknown top-k KL gradient '{gradient}'; use {' or '.join(get_args(TopkGradient))}")
    if log_p_Tk.shape != log_q_Tk.shape or log_p_Tk.shape[:-1] != log_prob_T.shape:
        shapes = f"p {list(log_p_Tk.shape)}, q {list(log_q_Tk.shape)}, sampled token {list(log_prob_T.shape)}"
        raise ValueError(f"top-k KL: log-probs of {shapes} do not belong together; pass [T, k], [T, k] and [T]")
