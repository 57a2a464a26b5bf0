"""Settings of the collapse guard: what it watches, for how long, and what the trainer then does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.sections.fields import count, setting

GuardAction = Literal["off", "warn", "stop", "rollback"]


@dataclass
class CollapseGuardConfig:
    """The collapse guard. A limit of null is not watched; one that no step can cross is an error (docs/health.md)."""

    action: GuardAction = setting(
        "warn",
        "What the guard does: off (watches nothing), warn (logs each alarm), stop (ends the run at an alarm), or "
        "rollback (goes back to the last good checkpoint with half the learning rate).",
    )
    patience: int = count(5, "Number of steps in a row in which a condition must hold to raise an alarm.")
    max_rollbacks: int = setting(2, "action=rollback: number of rollbacks in a run; the next alarm ends it.", ge=0)
    dead_run_steps: int | None = count(
        20,
        "Number of steps in a row (instead of patience) in which nothing could be learned: all rewards were the "
        "same, no group of trajectories had two different rewards, all advantages were 0, or the gradient was 0.",
    )
    max_invalid_action_ratio: float | None = setting(
        0.9, "Maximum share of turns without a valid action (health/invalid_action_ratio).", ge=0, lt=1
    )
    max_repetition: float | None = setting(
        0.8, "Maximum share of repeated token 4-grams (health/repetition).", ge=0, lt=1
    )
    max_empty_think_ratio: float | None = setting(
        None, "Maximum share of turns without a thought (health/empty_think_ratio).", ge=0, lt=1
    )
    max_zero_variance_groups: float | None = setting(
        None, "Maximum share of groups whose rewards are all equal (health/zero_variance_groups).", ge=0, lt=1
    )
    min_reward: float | None = setting(
        None, "Minimum mean score of a step (critic/score/mean); a small positive number detects a run without reward."
    )
    max_score_drop: float | None = setting(
        None, "Maximum drop of critic/score/mean below its best moving average over 10 steps.", gt=0
    )
    min_entropy: float | None = setting(
        None, "Minimum mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", gt=0
    )
    max_entropy: float | None = setting(
        None, "Maximum mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", gt=0
    )
    max_kl: float | None = setting(
        None, "Maximum KL to the anchor, in nats per token (actor/kl_loss, or critic/kl of a KL in the reward).", gt=0
    )
    max_grad_norm: float | None = setting(None, "Maximum gradient norm before clipping (actor/grad_norm).", gt=0)
    max_mismatch: float | None = setting(
        None,
        "Maximum mean difference between the log-probs of rollout engine and trainer, in nats "
        "(health/mismatch/mean_abs).",
        gt=0,
    )
