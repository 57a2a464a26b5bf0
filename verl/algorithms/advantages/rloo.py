"""REINFORCE leave-one-out (RLOO).

    A_i = R_i - (1 / (n - 1)) sum_{j != i} R_j      over the n trajectories of i's group

which equals n / (n - 1) (R_i - mu_g). A group of one has no others: its baseline is 0 and its advantage its reward.
Source: Ahmadian et al., "Back to Basics" (arXiv 2402.14740), the RLOO estimator.
"""

from __future__ import annotations

from verl.algorithms.advantages.groups import group_size, group_sum
from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import policy_rows, spread


@ADVANTAGES.register("rloo")
def rloo(given: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus the mean reward of the other trajectories of its group; reads no setting."""
    rows = policy_rows(given)
    others_B = group_sum(rows.reward_B, rows.group_B) - rows.reward_B
    num_others_B = group_size(rows.reward_B, rows.group_B) - 1
    advantage_B = rows.reward_B - others_B / num_others_B.clamp(min=1)
    return Advantages(spread(advantage_B, rows, given))
