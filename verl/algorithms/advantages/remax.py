"""ReMax: reward-to-go minus the reward of the greedy answer.

    A_t = sum_{k>=0} r_{t+k} - b_i      over the policy tokens of row i, undiscounted

with b_i the reward of the greedy answer to the same prompt.
Source: Li et al., ReMax (arXiv 2310.10505), the greedy baseline; rewards from t on, as in veRL, so that a
token is charged only for the KL that follows it.
"""

from __future__ import annotations

from verl.algorithms.advantages.inputs import ADVANTAGES, AdvantageInput, Advantages, AdvantageSettings
from verl.algorithms.advantages.rows import discounted_sum, scattered


@ADVANTAGES.register("remax")
def remax(inputs: AdvantageInput, settings: AdvantageSettings) -> Advantages:
    """Reward-to-go minus `inputs.baseline_B`; `return_T` is the reward-to-go. Reads no setting.

    Raises ValueError without `baseline_B`.
    """
    if inputs.baseline_B is None:
        raise ValueError("remax needs baseline_B: the reward of the greedy answer to each row's prompt")
    row_N = inputs.row_T[inputs.mask_T]
    return_N = discounted_sum(inputs.reward_T[inputs.mask_T], row_N, 1.0)
    baseline_N = inputs.baseline_B.to(return_N.dtype)[row_N]
    return Advantages(scattered(return_N - baseline_N, inputs.mask_T), scattered(return_N, inputs.mask_T))
