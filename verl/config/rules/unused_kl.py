"""A KL with coefficient 0 is no term of loss or reward: the run computes none, and loads no reference model for it."""

from __future__ import annotations

from verl.config.rules.predicates import anchor_is_read
from verl.config.sections.actor import ActorConfig
from verl.config.sections.schema import Config

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
    if actor.use_kl_loss and not actor.kl_loss_coef:
        for name in OF_KL_IN_LOSS:
            setattr(actor, name, getattr(ActorConfig(), name))
    elif algorithm.use_kl_in_reward and not algorithm.kl_ctrl.kl_coef:
        algorithm.use_kl_in_reward = False
        algorithm.kl_ctrl.type, algorithm.kl_ctrl.target_kl, algorithm.kl_ctrl.horizon = "fixed", None, None
    else:
        return
    if not anchor_is_read(config):
        algorithm.ref_policy_ema_tau = 1.0
        config.actor_rollout_ref.ref.log_probs = "auto"
