"""REINFORCE with the batch's mean reward as baseline; groups play no part.

    scale "none", "group_std":  A_i =  R_i - mu
    scale "batch_std":          A_i = (R_i - mu) / (s + 1e-6)

with mu the mean and s the unbiased std of R over all trajectories of the batch. "group_std" divides by nothing, because
there is no group here; equal rewards (s = 0) are divided by 1. A batch of one trajectory has nothing to compare with:
mu = 0.
Source: Williams (1992), "Simple statistical gradient-following algorithms", reinforcement baseline.
"""

from __future__ import annotations

import torch

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import centred, over_batch_std, policy_rows, spread


@ADVANTAGES.register("reinforce")
def reinforce(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus the batch's mean; ValueError for the scale "batch_std" with fewer than two rows."""
    rows = policy_rows(inputs)
    batch_B = torch.zeros_like(rows.group_B)
    advantage_B, batch_std = (centred(rows.reward_B, batch_B) if len(batch_B) > 1 else rows.reward_B), None
    if settings.scale == "batch_std":
        advantage_B, batch_std = over_batch_std(advantage_B)
    return Advantages(spread(advantage_B, rows, inputs), batch_std=batch_std)
