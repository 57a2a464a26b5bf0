"""REINFORCE++ with a group baseline.

    a_i = R_i - mu_g                                  at every policy token of trajectory i
    A_t = (a_t - mean a) / sqrt(var a + 1e-8)         over all policy tokens of the batch

A trajectory that is alone in its group, since the others failed, has no mean to compare with: its advantage is 0, and
its tokens are in neither mean nor var.
Source: Hu et al., REINFORCE++ (arXiv 2501.03262), the variant "w/ Baseline".
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import centred, compared_rows, scattered, whitened


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus its group's mean, whitened over policy tokens; reads no setting."""
    rows = compared_rows(inputs)
    whitened_N = whitened(centred(rows.reward_B, rows.group_B)[rows.row_N])
    return Advantages(scattered(whitened_N.to(inputs.reward_T.dtype), rows.mask_T))
