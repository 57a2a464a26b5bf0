"""Advantages of the samples of a group: those in the file, or else recomputed from the stored rewards if that can be
done exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from search_r1.viewer.run_settings import RunSettings

COLUMN = "advantages"  # of tokens, verl.tracking.trajectory_columns
EPSILON = 1e-6  # as in verl.algorithms.advantages.inputs


def group_advantages(rewards: Sequence[float | None], settings: RunSettings) -> tuple[list[float | None], str]:
    """One advantage per sample, and the formula; no numbers and "" if the run used another estimator.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2): (R - mean) / (std + 1e-6) with the unbiased std of the group,
    or R - mean without `norm_adv_by_std_in_grpo`. The samples that failed (None) are left out; one that is left alone
    has advantage 0. A KL in the reward or scaling by the batch cannot be recomputed from one group.
    """
    nothing: list[float | None] = [None] * len(rewards)
    whole = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if settings.setting("algorithm.adv_estimator") != "grpo" or not whole:
        return nothing, ""
    if settings.setting("algorithm.use_kl_in_reward") or settings.setting("algorithm.norm_adv_by_batch_std"):
        return nothing, ""
    scaled = bool(settings.setting("algorithm.norm_adv_by_std_in_grpo", True))
    mean, std = _mean_and_std(whole)
    divisor = std + EPSILON if scaled else 1.0
    formula = "(reward - mean) / (std + 1e-6)" if scaled else "reward - mean"
    return [None if reward is None else (reward - mean) / divisor for reward in rewards], formula


def stored_advantages(columns: Sequence[Sequence[float | None] | None]) -> tuple[list[float | None], str]:
    """One advantage per sample, from the `advantages` of its tokens (None if not trained on), and how it was computed.

    With GRPO, all tokens of a sample have the same advantage; with GAE or a KL in the reward, it is their mean.
    """
    known = [[value for value in column or () if value is not None] for column in columns]
    equal = all(len(set(values)) <= 1 for values in known)
    how = "as the loss saw it" if equal else "the mean over its tokens, as the loss saw them"
    return [(values[0] if equal else sum(values) / len(values)) if values else None for values in known], how


def _mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Equal rewards have exactly their own value as mean."""
    low = min(rewards)
    mean = low + sum(reward - low for reward in rewards) / len(rewards)
    return mean, math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1))
