"""OPO: the baseline of least gradient variance, approximated by weighting rewards with lengths.

    b_g = sum_j l_j R_j / sum_j l_j      over the trajectories j of the group, l_j = number of policy tokens
    A_i = R_i - b_g

The least variance is at E[|grad log pi|^2 R] / E[|grad log pi|^2]; the paper takes the squared norm as proportional to
the length. Only policy tokens give a gradient, so only they count. A trajectory that is alone in its group, since the
others failed, has nothing to compare with: its advantage is 0.
Source: Hao et al., "On-Policy RL with Optimal Reward Baseline" (arXiv 2505.23585).
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import centred, compared_rows, spread


@ADVANTAGES.register("opo")
def opo(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus its group's length-weighted mean; reads no setting."""
    rows = compared_rows(inputs)
    return Advantages(spread(centred(rows.reward_B, rows.group_B, rows.length_B), rows, inputs))
