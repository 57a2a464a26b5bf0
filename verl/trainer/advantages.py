"""From trajectory rewards to one advantage a token."""

from __future__ import annotations

from verl.algorithms.advantages import ADVANTAGES
from verl.config import AlgorithmConfig
from verl.protocol import TrainBatch


def estimate_advantages(batch: TrainBatch, config: AlgorithmConfig) -> dict[str, float]:
    """Adds `advantages` [T] to `batch`: the trajectory's advantage at policy tokens, 0 elsewhere. Returns metrics."""
    estimate = ADVANTAGES[config.adv_estimator](batch.rows["reward"], batch.rows["group"], _scale(config))
    batch.tokens["advantages"] = estimate.advantage_B[batch.row_of_token_T] * batch.tokens["loss_mask"]
    if estimate.batch_std is None:
        return {}
    batch.rows["adv_batch_std"] = estimate.batch_std.expand(len(batch))
    return {"actor/adv_batch_std": float(estimate.batch_std)}


def _scale(config: AlgorithmConfig) -> str:
    if config.norm_adv_by_batch_std:
        return "batch_std"
    return "group_std" if config.norm_adv_by_std_in_grpo else "none"
