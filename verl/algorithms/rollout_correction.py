"""Correction for a sampler (the inference engine) whose probabilities differ from the trainer's.

With d_t = l_old_t (trainer) - l_rollout_t (sampler) at a sampled token, the importance ratio is

    token:      exp(d_t)
    sequence:   exp(sum of d_t over the row)
    geometric:  exp(mean of d_t over the row)

Weights are truncated importance sampling, min(ratio, cap): Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training". Rejection drops tokens, or whole rows, whose ratio leaves [low, high]: Liu, Li et
al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch". A row's ratio is
that of all its policy tokens, whatever is rejected. Exponents are clamped to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

from verl.algorithms.aggregation import unit_sums
from verl.algorithms.log_probs import importance_ratio, mismatch

Importance = Literal["none", "token", "sequence"]
Rejection = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionSettings:
    """Which ratio weighs the loss, which one rejects tokens, and their bounds. Raises ValueError for wrong bounds."""

    importance: Importance = "none"
    importance_cap: float = 2.0
    reject: Rejection = "none"
    reject_low: float = 0.5
    reject_high: float = 2.0

    def __post_init__(self) -> None:
        _require_known("importance", self.importance, get_args(Importance))
        _require_known("reject", self.reject, get_args(Rejection))
        if self.importance_cap < 1:
            raise ValueError(f"importance_cap is {self.importance_cap}: it has to leave a ratio of 1 alone; use >= 1")
        if not 0 <= self.reject_low <= 1 <= self.reject_high:
            raise ValueError(
                f"reject_low {self.reject_low}, reject_high {self.reject_high}: a ratio of 1 has to pass; "
                "use 0 <= reject_low <= 1 <= reject_high"
            )


class Correction(NamedTuple):
    """`weight_T` [T] float, 1 where there is none; `keep_T` [T] bool: tokens that stay in the loss; named numbers."""

    weight_T: torch.Tensor
    keep_T: torch.Tensor
    metrics: dict[str, float]


@torch.no_grad()
def rollout_correction(
    log_prob_T: torch.Tensor,
    rollout_log_prob_T: torch.Tensor,
    mask_T: torch.Tensor,
    row_T: torch.Tensor,
    num_rows: int,
    settings: CorrectionSettings,
) -> Correction:
    """Weights and rejections from the trainer's and the sampler's log-probs [T] float of the same tokens.

    `mask_T` [T] bool marks policy tokens (values elsewhere are not read), `row_T` [T] int64 is the row of each token.
    Raises ValueError where a policy token's log-prob is not finite. Metrics, 0 when there is nothing to count:
    over policy tokens `log_ratio_abs_mean`, `log_ratio_abs_max` (nats), `k3_kl` (estimate of KL(sampler || trainer)),
    `rejected_share`; over kept tokens `effective_sample_share` ((sum w)^2 / (n sum w^2)) and `capped_share`.
    """
    log_ratio_T = torch.where(mask_T, log_prob_T - rollout_log_prob_T, 0.0)
    _require_finite(log_ratio_T)

    # Rejection and weight may be set to different ratios, so each has its own.
    tested_T = _ratio(settings.reject, log_ratio_T, mask_T, row_T, num_rows)
    keep_T = mask_T & (tested_T >= settings.reject_low) & (tested_T <= settings.reject_high)
    ratio_T = _ratio(settings.importance, log_ratio_T, mask_T, row_T, num_rows)
    weight_T = torch.where(keep_T, ratio_T.clamp(max=settings.importance_cap), 1.0)

    # How far sampler and trainer are apart, and what that cost.
    abs_N, k3_N = mismatch(log_ratio_T[mask_T].double())
    kept_N = weight_T[keep_T].double()
    metrics = {
        "log_ratio_abs_mean": _mean(abs_N),
        "log_ratio_abs_max": float(abs_N.max()) if len(abs_N) else 0.0,
        "k3_kl": _mean(k3_N),
        "rejected_share": _mean(~keep_T[mask_T]),
        "effective_sample_share": float(kept_N.mean().square() / kept_N.square().mean()) if len(kept_N) else 0.0,
        "capped_share": _mean(ratio_T[keep_T] > settings.importance_cap),
    }
    return Correction(weight_T, keep_T, metrics)


def _ratio(
    level: Rejection, log_ratio_T: torch.Tensor, mask_T: torch.Tensor, row_T: torch.Tensor, num_rows: int
) -> torch.Tensor:
    if level == "none":
        return torch.ones_like(log_ratio_T)
    if level == "token":
        return importance_ratio(log_ratio_T)
    log_ratio_B = unit_sums(log_ratio_T, row_T, num_rows)
    if level == "geometric":
        log_ratio_B = log_ratio_B / unit_sums(mask_T.to(log_ratio_T.dtype), row_T, num_rows).clamp(min=1)
    return importance_ratio(log_ratio_B)[row_T]


def _mean(value_N: torch.Tensor) -> float:
    return float(value_N.double().mean()) if len(value_N) else 0.0


def _require_finite(log_ratio_T: torch.Tensor) -> None:
    num_bad = int((~log_ratio_T.isfinite()).sum())
    if num_bad:
        raise ValueError(
            f"log_prob - rollout_log_prob is not finite at {num_bad} policy tokens: look for NaN or -inf in what the "
            "sampler returned and in the trainer's log-probs"
        )


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"rollout correction: unknown {name} '{value}'; known: {', '.join(known)}")
