"""Generalised advantage estimation (GAE) over the policy tokens of each row.

    delta_t = r_t + gamma V_{t'} - V_t
    A_t     = delta_t + gamma lam A_{t'}      t' = the next policy token of the row; after the last one V = A = 0
    return  = A_t + V_t                       the critic's target, before whitening
    advantage = (A_t - mean A) / sqrt(var A + 1e-8)

Environment tokens between t and t' are skipped: they are the environment's answer to an action, not actions, so they
take no discount and their values are not read. With `chain_T` the recursion visits its tokens instead (all response
tokens: what Search-R1 published), and whitening and results cover them too; rewards outside `mask_T` still count 0.
Source: Schulman et al. (arXiv 1506.02438), eq. 16.
"""

from __future__ import annotations

import torch

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import discounted_sum, following, scattered, whitened


@ADVANTAGES.register("gae")
def gae(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """Whitened GAE and the critic's targets. Reads `gamma` and `lam`; raises ValueError without `value_T`."""
    if inputs.value_T is None:
        raise ValueError("gae needs value_T: the critic's value before each token")
    chain_T = inputs.mask_T if inputs.chain_T is None else inputs.chain_T
    reward_N = torch.where(inputs.mask_T, inputs.reward_T, 0.0)[chain_T]
    value_N, row_N = inputs.value_T[chain_T].to(reward_N.dtype), inputs.row_T[chain_T]
    delta_N = reward_N + settings.gamma * following(value_N, row_N) - value_N
    advantage_N = discounted_sum(delta_N, row_N, settings.gamma * settings.lam)
    return Advantages(scattered(whitened(advantage_N), chain_T), scattered(advantage_N + value_N, chain_T))
