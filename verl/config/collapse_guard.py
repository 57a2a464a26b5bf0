"""Settings of the collapse guard: what it watches, for how long, and what the trainer then does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.fields import setting

GuardAction = Literal["off", "warn", "stop", "rollback"]


@dataclass
class CollapseGuardConfig:
    """The collapse guard. A threshold of null is not watched; docs/health.md explains the metrics."""

    action: GuardAction = setting(
        "warn",
        "What an alarm does: nothing is watched (off), a line in the log (warn), end the run (stop), or go back to the "
        "last good checkpoint with half the learning rate (rollback).",
    )
    patience: int = setting(5, "Steps in a row that a condition must hold before it is an alarm.", ge=1)
    max_rollbacks: int = setting(2, "action=rollback: alarms answered by going back; the next one ends the run.", ge=0)
    dead_run_steps: int | None = setting(
        20,
        "Steps in a row (instead of patience) in which nothing could be learned: all rewards were the same, no group "
        "of trajectories had two different ones, all advantages were 0, or the gradient was.",
        ge=1,
    )
    max_invalid_action_ratio: float | None = setting(
        0.9, "Largest share of turns without a valid action (health/invalid_action_ratio).", ge=0, lt=1
    )
    max_repetition: float | None = setting(
        0.8, "Largest share of repeated 4-grams of tokens (health/repetition).", ge=0, lt=1
    )
    max_empty_think_ratio: float | None = setting(
        None, "Largest share of turns without a thought (health/empty_think_ratio).", ge=0, lt=1
    )
    max_zero_variance_groups: float | None = setting(
        None, "Largest share of groups whose rewards are all equal (health/zero_variance_groups).", ge=0, lt=1
    )
    min_reward: float | None = setting(
        None, "Smallest mean score of a step (critic/score/mean); a small positive number finds a run without reward."
    )
    max_score_drop: float | None = setting(
        None, "Largest fall of critic/score/mean below its best moving average over 10 steps.", gt=0
    )
    min_entropy: float | None = setting(
        None, "Smallest mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", ge=0
    )
    max_entropy: float | None = setting(
        None, "Largest mean entropy, in nats per token (health/entropy, else actor/entropy_loss).", gt=0
    )
    max_kl: float | None = setting(None, "Largest KL to the anchor, in nats per token (actor/kl_loss).", gt=0)
    max_grad_norm: float | None = setting(None, "Largest gradient norm before clipping (actor/grad_norm).", gt=0)
    max_mismatch: float | None = setting(
        None,
        "Largest mean difference of the sampler's and the trainer's log-probs, in nats (health/mismatch/mean_abs).",
        gt=0,
    )
