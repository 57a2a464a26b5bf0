"""Checks of the collapse guard's settings: among them, that each limit is one that a step can cross."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.rules.predicates import compares_sampler, has_kl_in_reward, trajectories_per_step, truncates_sampling
from verl.config.sections.agent import RewardConfig
from verl.config.sections.schema import Config

GUARD = "trainer.collapse_guard"
NO_LIMITS = ("action", "patience", "max_rollbacks")  # settings of the guard that say what follows a crossed limit


def guard_problems(config: Config) -> Iterator[str]:
    guard = config.trainer.collapse_guard
    if guard.min_entropy is not None and guard.max_entropy is not None and guard.min_entropy >= guard.max_entropy:
        yield (
            f"trainer.collapse_guard.min_entropy ({guard.min_entropy}) must be smaller than "
            f"max_entropy ({guard.max_entropy})"
        )
    if guard.action == "rollback" and config.trainer.save_freq < 0:
        yield "trainer.collapse_guard.action=rollback needs checkpoints to go back to: set trainer.save_freq"
    watched = {name: limit for name, limit in vars(guard).items() if name not in NO_LIMITS}
    if guard.action != "off" and all(limit is None for limit in watched.values()):
        yield (
            f"trainer.collapse_guard.action={guard.action} has nothing to watch: set one of its limits (such as "
            "dead_run_steps) or action=off"
        )
    if guard.action != "off" and not config.trainer.val_only:
        for name, why in _never_crossed(config).items():
            if watched[name] is not None:
                yield f"{GUARD}.{name}={watched[name]:g} can never be crossed: {why}, or leave it at null"


def _never_crossed(config: Config) -> dict[str, str]:
    """Each limit that no step of this run can cross: why, and what would have to be set."""
    guard, reasons = config.trainer.collapse_guard, {}

    # Limits of metrics that the run does not have.
    if not config.actor_rollout_ref.actor.use_kl_loss and not has_kl_in_reward(config):
        reasons["max_kl"] = (
            "there is no KL to the anchor; set actor_rollout_ref.actor.use_kl_loss=True (kl_loss_coef=0 only measures "
            "it) or algorithm.use_kl_in_reward=True"
        )
    if truncates_sampling(config):
        reasons["max_mismatch"] = (
            "with top_p below 1 or a top_k the log-probs of rollout engine and trainer differ by what is cut off, so "
            "they are not compared; set actor_rollout_ref.rollout.top_p=1.0 and top_k=-1"
        )
    elif not compares_sampler(config):
        reasons["max_mismatch"] = (
            "the trainer computes no log-probs of its own to compare; set "
            "actor_rollout_ref.actor.use_rollout_log_probs=False"
        )
    if trajectories_per_step(config) <= config.data.train_batch_size:
        reasons["max_zero_variance_groups"] = (
            "a prompt has one trajectory, so there are no groups; set actor_rollout_ref.rollout.n_agent to 2 or more"
        )

    # Limits outside the range of the default reward, which is from 0 to 1.
    if config.reward.function == RewardConfig().function:
        if guard.min_reward is not None and guard.min_reward <= 0:
            reasons["min_reward"] = f"no score of {config.reward.function} is below 0; set it to 0.01, for example"
        if guard.max_score_drop is not None and guard.max_score_drop >= 1:
            reasons["max_score_drop"] = f"scores of {config.reward.function} are 0 to 1; set it to 0.2, for example"
    return reasons
