"""REINFORCE++: discounted reward-to-go, whitened over all policy tokens of the batch.

    G_t = sum_{k>=0} gamma^k r_{t+k}      over the policy tokens of the row, environment tokens not counted
    A_t = (G_t - mean G) / sqrt(var G + 1e-8)

Source: Hu et al., REINFORCE++ (arXiv 2501.03262), "global advantage normalization"; its KL term is part of r.
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import discounted_sum, scattered, whitened


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """Whitened reward-to-go; `return_T` is the reward-to-go itself. Reads `settings.gamma`."""
    return_N = discounted_sum(inputs.reward_T[inputs.mask_T], inputs.row_T[inputs.mask_T], settings.gamma)
    return Advantages(scattered(whitened(return_N), inputs.mask_T), scattered(return_N, inputs.mask_T))
