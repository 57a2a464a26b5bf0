"""Warnings about a configuration, before the run: what is possible, and so not refused, but hardly what was meant."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config.rules.asynchronous import OVER_SAMPLE
from verl.config.rules.predicates import (
    max_staleness,
    num_optimizer_steps,
    old_policy_is_current,
    samples_kl,
    trajectories_per_step,
    truncates_sampling,
)
from verl.config.rules.validate import ACTOR, ROLLOUT
from verl.config.rules.without_effect import without_effect
from verl.config.sections.schema import Config


def config_warnings(config: Config) -> Iterator[str]:
    """One message for each setting that will hardly do what was meant; none for a run that only validates."""
    if config.trainer.val_only:
        return
    yield from _truncated_sampling(config)
    yield from _kl_without_gradient(config)
    yield from _stale_without_correction(config)
    yield from _stale_kl(config)
    yield from _llds_without_a_fall(config)
    yield from without_effect(config)


def _truncated_sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if truncates_sampling(config):
        yield (
            f"{ROLLOUT}.top_p={rollout.top_p:g} and top_k={rollout.top_k} cut off unlikely tokens, and the "
            "log-probs in the loss do not know of it: the update is biased. Set top_p=1.0 and top_k=-1."
        )


def _kl_without_gradient(config: Config) -> Iterator[str]:
    """The gradient of log p - log q is that of log p, which is 0 in the mean over tokens drawn from p."""
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_coef and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"{ACTOR}.kl_loss_type={actor.kl_loss_type} has a gradient of zero on average: as a loss it adds "
            f"noise and does not keep the policy near the reference. Set it to {actor.kl_loss_type}+ (same value, "
            "gradient of k2), mse (k2) or low_var_kl (k3), or put the KL into the reward "
            "(algorithm.use_kl_in_reward)."
        )


def _stale_without_correction(config: Config) -> Iterator[str]:
    """A ratio to the sampler's own log-probs corrects for old weights, too."""
    actor = config.actor_rollout_ref.actor
    in_the_ratio = actor.use_rollout_log_probs and actor.policy_loss != "reinforce"
    if max_staleness(config) and actor.rollout_correction.importance == "none" and not in_the_ratio:
        yield (
            f"{_what_is_stale(config)} trains on samples of older weights, and nothing corrects for that: set "
            f"{ACTOR}.rollout_correction.importance=token (truncated importance weights) with "
            f"{ACTOR}.use_rollout_log_probs=False."
        )


def _stale_kl(config: Config) -> Iterator[str]:
    """The weights that correct the policy loss for older weights do not reach the KL, which has weights of its own."""
    actor = config.actor_rollout_ref.actor
    if max_staleness(config) and actor.kl_loss_coef and samples_kl(actor) and not actor.use_kl_iw:
        yield (
            f"{_what_is_stale(config)} estimates the KL in the loss from tokens of older weights, and nothing corrects "
            f"for that: set {ACTOR}.use_kl_iw=True, or use an exact KL ({ACTOR}.kl_loss_type=full_reverse without "
            "kl_topk_tokens)."
        )


def _llds_without_a_fall(config: Config) -> Iterator[str]:
    """A likelihood falls by an optimizer step, so that the next one on the same trajectories can see it."""
    if not config.actor_rollout_ref.actor.llds_coef or num_optimizer_steps(config) > 1:
        return
    if old_policy_is_current(config):
        yield (
            f"{ACTOR}.llds_coef={config.actor_rollout_ref.actor.llds_coef:g} has no effect with one optimizer step on "
            "the trajectories of an RL step: no likelihood has fallen before it. Set "
            f"{ACTOR}.ppo_mini_batch_size to a part of the {trajectories_per_step(config)} trajectories, or ppo_epochs "
            "to 2 or more."
        )


def _what_is_stale(config: Config) -> str:
    if config.trainer.async_rollout == "off":
        return f"{OVER_SAMPLE}={config.actor_rollout_ref.rollout.over_sample:g}"
    return f"trainer.async_rollout={config.trainer.async_rollout}"
