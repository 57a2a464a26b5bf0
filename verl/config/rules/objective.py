"""Checks of the settings of what is minimised (the policy loss, the KL and its anchor), and of the guard that watches
it.

Each limit of the collapse guard has to be one that a step can cross. A KL with coefficient 0 is no term of loss or
reward: the run computes none, and loads no reference model for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from verl.config.rules.predicates import (
    anchor_is_read,
    compares_sampler,
    corrects_rollout,
    has_kl_in_reward,
    has_sampled_kl,
    max_staleness,
    num_optimizer_steps,
    reasons_to_score_before,
    trajectories_per_step,
    truncates_sampling,
)
from verl.config.sections.actor import ActorConfig
from verl.config.sections.agent import RewardConfig
from verl.config.sections.schema import Config

ACTOR = "actor_rollout_ref.actor"

# Largest relative step of the adaptive KL weight, for one horizon of trajectories (verl/algorithms/kl/controller.py).
LARGEST_KL_STEP = 0.2


def _scores(config: Config) -> Iterator[str]:
    if config.actor_rollout_ref.actor.old_log_probs != "update" or config.trainer.val_only:
        return
    for reason in reasons_to_score_before(config):
        yield f"{ACTOR}.old_log_probs=update is too late: {reason}, or leave it at auto"


def _ref_scores(config: Config) -> Iterator[str]:
    wanted, key = config.actor_rollout_ref.ref.log_probs, "actor_rollout_ref.ref.log_probs"
    if wanted == "auto" or config.trainer.val_only:
        return
    if wanted == "update" and has_kl_in_reward(config):
        yield f"{key}=update is too late: the KL in the reward reads them before the update; leave it at auto"
    elif not has_sampled_kl(config.actor_rollout_ref.actor) and not has_kl_in_reward(config):
        yield (
            f"{key}={wanted} has no effect: only a KL in the reward and a sampled KL in the loss (use_kl_loss=True and "
            "a kl_loss_type other than full_*) read the reference's log-probs; leave it at auto"
        )
    elif wanted == "update" and config.actor_rollout_ref.actor.ppo_epochs > 1:
        yield (
            f"{key}=update would recompute the reference log-probs in every epoch: set ppo_epochs=1, or leave it "
            "at auto"
        )


def _kl_weight(config: Config) -> Iterator[str]:
    control = config.algorithm.kl_ctrl

    # A fixed weight reads neither a target nor a horizon; an adaptive one needs both.
    if control.type != "adaptive":
        for name in ("target_kl", "horizon"):
            if getattr(control, name) is not None:
                yield (
                    f"algorithm.kl_ctrl.{name} has no effect with type=fixed: set algorithm.kl_ctrl.type=adaptive, or "
                    "leave it at null"
                )
        return
    if control.target_kl is None or control.horizon is None:
        yield "algorithm.kl_ctrl.type=adaptive needs algorithm.kl_ctrl.target_kl and algorithm.kl_ctrl.horizon"
        return

    # It steers a KL in the reward, and a step must not be able to bring it to zero, where it would stay.
    if not has_kl_in_reward(config):
        other = f" (and {ACTOR}.use_kl_loss=False)" if config.actor_rollout_ref.actor.use_kl_loss else ""
        yield (
            "algorithm.kl_ctrl.type=adaptive adapts the coefficient of a KL in the reward, and there is none: "
            f"set algorithm.use_kl_in_reward=True{other}, or leave the type at fixed"
        )
        return
    largest_step = LARGEST_KL_STEP * trajectories_per_step(config)
    if largest_step >= control.horizon and not config.trainer.val_only:
        yield (
            f"algorithm.kl_ctrl.horizon={control.horizon} lets the KL coefficient reach zero in one step of "
            f"{trajectories_per_step(config)} trajectories: set it above {largest_step:g}"
        )


def _kl(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield (
            f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward exclude each other, because the KL would count "
            "twice: set one of them to False"
        )
    yield from _kl_loss(actor) if actor.use_kl_loss else _settings_of_no_kl_loss(actor)
    if config.algorithm.ref_policy_ema_tau < 1 and not anchor_is_read(config) and not config.trainer.val_only:
        yield (
            f"algorithm.ref_policy_ema_tau={config.algorithm.ref_policy_ema_tau} moves an anchor that nothing uses: "
            f"set {ACTOR}.use_kl_loss=True or algorithm.use_kl_in_reward=True"
        )


def _kl_loss(actor: ActorConfig) -> Iterator[str]:
    top_k = actor.kl_topk_tokens or 0
    # Settings of a top-k KL without one, and a top-k KL without the exact KL that it is a form of.
    for name, usual in (("kl_topk_gradient", "corrected"), ("kl_use_tail_sampling", True)):
        if getattr(actor, name) != usual and top_k <= 0:
            yield (
                f"{ACTOR}.{name}={getattr(actor, name)} is for a Top-k KL: set {ACTOR}.kl_topk_tokens to a number of "
                f"tokens (such as 32) or leave it at {usual}"
            )
    if top_k > 0 and not actor.kl_loss_type.startswith("full_"):
        yield (
            f"{ACTOR}.kl_topk_tokens={actor.kl_topk_tokens} has no effect with kl_loss_type={actor.kl_loss_type}: "
            "it is for full_reverse and full_forward"
        )
    # Limits of the importance weight.
    lower, upper = actor.kl_iw_clip_lower, actor.kl_iw_clip_upper
    for name in ("kl_iw_clip_lower", "kl_iw_clip_upper"):
        if getattr(actor, name) is not None and not actor.use_kl_iw:
            yield f"{ACTOR}.{name} has no effect with use_kl_iw=False: set {ACTOR}.use_kl_iw=True, or leave it at null"
    if actor.use_kl_iw and lower is not None and upper is not None and lower > upper:
        yield f"{ACTOR}.kl_iw_clip_lower ({lower}) is larger than {ACTOR}.kl_iw_clip_upper ({upper})"


def _settings_of_no_kl_loss(actor: ActorConfig) -> Iterator[str]:
    """Settings of a KL in the loss where there is none. Its type and weight may be set: published commands do."""
    set_to_something = {
        "use_kl_iw": actor.use_kl_iw,
        "kl_iw_clip_lower": actor.kl_iw_clip_lower is not None,
        "kl_iw_clip_upper": actor.kl_iw_clip_upper is not None,
        "kl_topk_tokens": (actor.kl_topk_tokens or 0) > 0,
        "kl_topk_gradient": actor.kl_topk_gradient != "corrected",
        "kl_use_tail_sampling": not actor.kl_use_tail_sampling,
    }
    for name in (name for name, given in set_to_something.items() if given):
        yield (
            f"{ACTOR}.{name}={getattr(actor, name)} has no effect with use_kl_loss=False: "
            f"set {ACTOR}.use_kl_loss=True, or leave {name} out"
        )


def _policy_loss(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor

    # How the losses of tokens are added up.
    normed = actor.loss_agg_mode == "seq-mean-token-sum-norm"
    if normed and actor.loss_scale_factor is None:
        yield (
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm divides by a constant number of tokens: set "
            f"{ACTOR}.loss_scale_factor, for example to data.max_prompt_length"
        )
    if not normed and actor.loss_scale_factor is not None:
        yield f"{ACTOR}.loss_scale_factor has no effect with loss_agg_mode={actor.loss_agg_mode}: leave it at null"

    # What the loss itself reads.
    if actor.clip_ratio_c is not None and actor.policy_loss not in ("ppo", "gspo"):
        yield f"{ACTOR}.clip_ratio_c has no effect with policy_loss={actor.policy_loss}: leave it at null"
    if actor.policy_loss == "gspo" and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"{ACTOR}.policy_loss=gspo has one ratio per trajectory, but loss_agg_mode={actor.loss_agg_mode} "
            f"counts it once per token: set {ACTOR}.loss_agg_mode=seq-mean-token-mean"
        )

    # What weighs or rejects its tokens.
    correction = actor.rollout_correction
    if corrects_rollout(actor) and actor.use_rollout_log_probs:
        yield (
            f"{ACTOR}.rollout_correction compares the rollout engine's log-probs with recomputed ones: set "
            f"{ACTOR}.use_rollout_log_probs=False"
        )
    if not correction.reject_low <= 1 <= correction.reject_high or correction.importance_cap < 1:
        yield (
            f"{ACTOR}.rollout_correction must keep a ratio of 1 (equal probabilities): set reject_low to at most "
            "1, reject_high and importance_cap to at least 1"
        )


def _on_policy(config: Config) -> Iterator[str]:
    actor, total = config.actor_rollout_ref.actor, trajectories_per_step(config)
    num_updates = num_optimizer_steps(config)
    if actor.policy_loss == "reinforce" and num_updates > 1 and not config.trainer.val_only:
        yield (
            f"{ACTOR}.policy_loss=reinforce does not correct for a policy that has changed, but {num_updates} "
            f"optimizer steps are made on the trajectories of a step: set {ACTOR}.ppo_mini_batch_size={total} and "
            "ppo_epochs=1, or policy_loss=ppo"
        )


OBJECTIVE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    _kl_weight,
    _kl,
    _policy_loss,
    _on_policy,
    _scores,
    _ref_scores,
)


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
    elif guard.action == "rollback" and config.trainer.save_freq > 0:
        yield from _too_few_kept(config)
    watched = {name: limit for name, limit in vars(guard).items() if name not in NO_LIMITS}
    if guard.action != "off" and all(limit is None for limit in watched.values()):
        yield (
            f"trainer.collapse_guard.action={guard.action} has nothing to watch: set one of its limits (such as "
            "dead_run_steps) or action=off"
        )
    # A validation has no steps that could cross a limit, so there the limits are left alone.
    if guard.action != "off" and not config.trainer.val_only:
        for name, why in _never_crossed(config).items():
            if watched[name] is not None:
                yield f"{GUARD}.{name}={watched[name]:g} can never be crossed: {why}, or leave it at null"


def _too_few_kept(config: Config) -> Iterator[str]:
    """An alarm comes some steps after the first bad weights: the last good checkpoint must not be removed meanwhile."""
    guard, keep, every = config.trainer.collapse_guard, config.trainer.max_ckpt_to_keep, config.trainer.save_freq
    steps = max(guard.patience, guard.dead_run_steps or 0) + max_staleness(config)
    needed = -(-steps // every) + 1
    if keep is not None and keep < needed:
        yield (
            f"{GUARD}.action=rollback: an alarm may come {steps} steps after the first bad weights (patience, "
            f"dead_run_steps), and with trainer.save_freq={every} the last {keep} checkpoints may then all be bad: set "
            f"trainer.max_ckpt_to_keep={needed} or more, or raise trainer.save_freq"
        )


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


OF_KL_IN_LOSS = (
    *("use_kl_loss", "use_kl_iw", "kl_iw_clip_lower", "kl_iw_clip_upper"),
    *("kl_topk_tokens", "kl_topk_gradient", "kl_use_tail_sampling"),
)
"""Settings of the actor that may not be set without a KL in the loss."""


def leave_out_unused_kl(config: Config) -> None:
    """Turn off a KL with coefficient 0, with the settings that it alone reads.

    It stays where the collapse guard watches it, or validation reads the reference, which is then there anyway.
    """
    actor, algorithm, trainer = config.actor_rollout_ref.actor, config.algorithm, config.trainer
    watched = trainer.collapse_guard.action != "off" and trainer.collapse_guard.max_kl is not None
    if watched or trainer.eval_ref_policy_freq > 0:
        return
    # What only this KL reads gets its default again: without a KL, other values would be reported as errors.
    if actor.use_kl_loss and not actor.kl_loss_coef:
        for name in OF_KL_IN_LOSS:
            setattr(actor, name, getattr(ActorConfig(), name))
    elif algorithm.use_kl_in_reward and not algorithm.kl_ctrl.kl_coef:
        algorithm.use_kl_in_reward = False
        algorithm.kl_ctrl.type, algorithm.kl_ctrl.target_kl, algorithm.kl_ctrl.horizon = "fixed", None, None
    else:
        return
    # The same holds for the anchor's settings, unless something else reads it.
    if not anchor_is_read(config):
        algorithm.ref_policy_ema_tau = 1.0
        config.actor_rollout_ref.ref.log_probs = "auto"
