"""Group-relative advantages of single turns.

A trajectory i of a group has K_i turns with rewards r_i1 .. r_iK; a reward of the whole is given to the last one. With
the return from turn k on, G_ik = r_ik + .. + r_iK, and n trajectories in the group, every token of turn k has

    A_ik = G_ik - (1 / (n - 1)) sum_{j != i} G_{j, min(k, K_j)}

and with the scale "batch_std" this over s + 1e-6, s the unbiased std over the batch of G_j1 minus its group's mean.

The baseline of turn k is a function of the other trajectories only, so the expected gradient is that of the expected
reward, although the policy decides when to stop. A baseline over "those that reached turn k", with i among them, is
biased: whether i is among them depends on its own actions. So is a divisor of the group, which depends on i's own
reward; none is applied. A trajectory that stopped before k counts with the return of its last turn: if all rewards are
at the end, A_ik is that of `rloo` in every turn. A trajectory that is alone in its group has advantage 0.

docs/turn_credit.md has the derivation, and the exact errors in a small decision process.
"""

from __future__ import annotations

import torch

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import (
    batch_divisor,
    centred,
    compared_rows,
    discounted_sum,
    group_size,
    over_batch_std,
    scattered,
)


@ADVANTAGES.register("grpo_turns")
def grpo_turns(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """The return from a turn on minus that of the others. Of `settings.scale` it reads "batch_std"."""
    rows = compared_rows(inputs)
    turn_T = torch.zeros_like(inputs.row_T) if inputs.turn_T is None else inputs.turn_T
    turn_N, num_rows = turn_T[rows.mask_T], len(rows.reward_B)
    if num_rows == 0:
        return Advantages(torch.zeros_like(inputs.reward_T))

    # The return from each turn on, [B, K]; after a row's last turn, the return of that one.
    to_go_N = discounted_sum(inputs.reward_T[rows.mask_T].double(), rows.row_N, 1.0)
    first_N = torch.ones_like(turn_N, dtype=torch.bool)
    first_N[1:] = (turn_N[1:] != turn_N[:-1]) | (rows.row_N[1:] != rows.row_N[:-1])
    turns_B = torch.bincount(rows.row_N[first_N], minlength=num_rows)
    turn_N = first_N.cumsum(0) - 1 - (turns_B.cumsum(0) - turns_B)[rows.row_N]
    return_BK = to_go_N.new_zeros(num_rows, int(turns_B.max()))
    return_BK[rows.row_N[first_N], turn_N[first_N]] = to_go_N[first_N]
    reached_BK = torch.arange(return_BK.shape[1]).minimum(turns_B[:, None] - 1)
    return_BK = return_BK.gather(1, reached_BK)

    # Leave-one-out, as n / (n - 1) times the difference from the group's mean: equal returns give exactly 0.
    size_B = group_size(rows.reward_B, rows.group_B)
    factor_B, batch_std = size_B / (size_B - 1), None
    if settings.scale == "batch_std":
        batch_std = over_batch_std(centred(rows.reward_B, rows.group_B))[1]
        factor_B = factor_B / batch_divisor(batch_std)
    advantage_BK = torch.stack([centred(one_B, rows.group_B) * factor_B for one_B in return_BK.unbind(1)], dim=1)

    advantage_N = advantage_BK[rows.row_N, turn_N].to(inputs.reward_T.dtype)
    return Advantages(scattered(advantage_N, rows.mask_T), batch_std=batch_std)
