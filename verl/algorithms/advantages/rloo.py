"""REINFORCE leave-one-out (RLOO).

    A_i = R_i - (1 / (n - 1)) sum_{j != i} R_j      over the n trajectories of i's group

which equals n / (n - 1) (R_i - mu_g), and is computed so: equal rewards then give exactly 0. A trajectory that is alone
in its group, since the others failed, has nothing to compare with: its advantage is 0.
Source: Ahmadian et al., "Back to Basics" (arXiv 2402.14740), the RLOO estimator.
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import centred, compared_rows, group_size, spread


@ADVANTAGES.register("rloo")
def rloo(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus the mean reward of the other trajectories of its group; reads no setting."""
    rows = compared_rows(inputs)
    size_B = group_size(rows.reward_B, rows.group_B)
    advantage_B = centred(rows.reward_B, rows.group_B) * size_B / (size_B - 1)
    return Advantages(spread(advantage_B, rows, inputs))
