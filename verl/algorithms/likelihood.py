"""LLDS: keep the likelihood of good behaviour from falling (Deng et al., arXiv 2512.04220).

GRPO can lower the likelihood of correct responses together with that of the wrong ones ("lazy likelihood
displacement"). The penalty is active for a unit u of tokens that was not bad and became less likely as a whole, and
there only for the tokens that became less likely:

    gate_u    = 1[A_u >= 0] 1[sum over t in u of (l_old_t - l_t) > sum over t in u of e_t]
    penalty_t = gate_u 1[l_old_t - l_t > e_t] (l_old_t - l_t),   e_t = 64 2^-23 (1 + |l_old_t|)

Taken from the paper: both gates, the token's hinge, and the two choices of the unit: the whole response (row), or one
action (turn). Normalisation and coefficient are left to the caller. Not in the paper: e_t, some 30 times what two
forward passes in float32 over the same weights differ by. The gradient of the hinge has the same size however little a
token fell, so without e_t rounding alone would open gates and move weights.
"""

from __future__ import annotations

import torch

from verl.algorithms.aggregation import unit_sums

ROUNDING = 64 * torch.finfo(torch.float32).eps


def llds(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, unit_T: torch.Tensor
) -> torch.Tensor:
    """Penalty per token [T] >= 0 for the policy's tokens; gradient flows through `log_prob_T` only.

    The first three are [T] float. `unit_T` [T] holds any non-negative integers: tokens with the same one share a gate
    (turns need numbers that no other row uses). A_u is the mean advantage of the unit's tokens.
    """
    old_T = old_log_prob_T.detach()
    fall_T = old_T - log_prob_T
    beyond_T = fall_T.detach() - ROUNDING * (1 + old_T.abs())
    return torch.where(_gate(beyond_T, advantage_T.detach(), unit_T) & (beyond_T > 0), fall_T, 0.0)


def _gate(beyond_T: torch.Tensor, advantage_T: torch.Tensor, unit_T: torch.Tensor) -> torch.Tensor:
    units, index_T = unit_T.unique(return_inverse=True)
    fell_U = unit_sums(beyond_T, index_T, len(units)) > 0
    good_U = unit_sums(advantage_T, index_T, len(units)) >= 0  # the sum has the sign of the mean
    return (fell_U & good_U)[index_T]
