"""Group-relative advantages (GRPO).

For a trajectory i of group g (the trajectories of one prompt) with reward R_i, mean mu_g and unbiased std sigma_g:

    scale "group_std":  A_i = (R_i - mu_g) / (sigma_g + 1e-6)
    scale "none":       A_i =  R_i - mu_g
    scale "batch_std":  A_i = (R_i - mu_g) / (s + 1e-6),  s = unbiased std over the batch of (R_j - mu_g(j))

A batch of equal rewards (s = 0) is divided by 1. A trajectory that is alone in its group, since the others failed, has
no mean to compare with: its advantage is 0, and it does not count in s.
Sources: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2; "none" is Dr. GRPO (arXiv 2503.20783);
"batch_std" is EMA-PG (arXiv 2602.04417), which divides the KL loss by the same.
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import centred, compared_rows, over_batch_std, over_group_std, spread


@ADVANTAGES.register("grpo")
def grpo(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """R_i minus its group's mean, scaled by `settings.scale`."""
    rows = compared_rows(inputs)
    advantage_B, batch_std = centred(rows.reward_B, rows.group_B), None
    if settings.scale == "group_std":
        advantage_B = over_group_std(advantage_B, rows.group_B)
    elif settings.scale == "batch_std":
        advantage_B, batch_std = over_batch_std(advantage_B)
    return Advantages(spread(advantage_B, rows, inputs), batch_std=batch_std)
