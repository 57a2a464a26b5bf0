"""LLDS: keep the likelihood of good behaviour from falling (Deng et al., arXiv 2512.04220).

GRPO can lower the likelihood of correct responses together with that of the wrong ones ("lazy likelihood
displacement"). The penalty is active for a unit u of tokens that was not bad and became less likely as a whole, and
there only for the tokens that became less likely:

    gate_u    = 1[A_u >= 0] 1[sum over t in u of (l_old_t - l_t) > 0]
    penalty_t = gate_u max(0, l_old_t - l_t)

Taken from the paper: both gates, the token's hinge, and the two choices of the unit: the whole response (row), or one
action (turn). Normalisation and coefficient are left to the caller.
"""

from __future__ import annotations

import torch

from verl.algorithms.aggregation import unit_sums


def llds(
    log_prob_T: torch.Tensor, old_log_prob_T: torch.Tensor, advantage_T: torch.Tensor, unit_T: torch.Tensor
) -> torch.Tensor:
    """Penalty per token [T] >= 0 for the policy's tokens; gradient flows through `log_prob_T` only.

    The first three are [T] float. `unit_T` [T] holds any non-negative integers: tokens with the same one share a gate
    (turns need numbers that no other row uses). A_u is the mean advantage of the unit's tokens.
    """
    fall_T = old_log_prob_T.detach() - log_prob_T
    return torch.where(_gate(fall_T.detach(), advantage_T.detach(), unit_T), fall_T.relu(), 0.0)


def _gate(fall_T: torch.Tensor, advantage_T: torch.Tensor, unit_T: torch.Tensor) -> torch.Tensor:
    units, index_T = unit_T.unique(return_inverse=True)
    fell_U = unit_sums(fall_T, index_T, len(units)) > 0
    good_U = unit_sums(advantage_T, index_T, len(units)) >= 0  # the sum has the sign of the mean
    return (fell_U & good_U)[index_T]
