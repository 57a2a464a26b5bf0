"""Settings that nothing in a run reads because of others: a table of them, and warnings for those that were changed.

A setting that nobody changes without expecting something else is refused (`validate`). Those in the table are harmless,
and a config that was written for another run may have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from verl.config.rules.predicates import (
    anchor_is_base,
    anchor_moves,
    has_anchor,
    has_critic,
    has_kl_in_reward,
    needs_ref_log_probs,
    num_mini_batches,
    policy_topk,
    samples_kl,
    scores_in_update,
    trajectories_per_step,
)
from verl.config.sections.actor import RolloutCorrectionConfig
from verl.config.sections.fields import Key, is_changed, leaves, value_at
from verl.config.sections.schema import Config

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
PASS = ("log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
CORRECTION, GUARD = f"{ACTOR}.rollout_correction", "trainer.collapse_guard"
# Key: why it has no effect, and what to use instead. The default is the only value that may stand there.
INERT_KEYS = {
    "data.return_raw_input_ids": "token ids are never decoded and encoded again; the trajectory files have the ids",
    "data.return_raw_chat": "the trajectory files (trainer.save_trajectories=true) always have the prompt",
    "actor_rollout_ref.hybrid_engine": "trainer.layout decides whether the rollout engine shares the actor's devices",
    "actor_rollout_ref.rollout.do_sample": (
        "training always samples; for greedy or sampled validation set actor_rollout_ref.rollout.val_kwargs.do_sample"
    ),
    "algorithm.no_think_rl": "Search-R1's code refuses it too; the prompt (agent.template) decides whether to think",
    "algorithm.state_masking.start_state_marker": ("tokens are masked by who wrote them, not by markers in the text"),
    "algorithm.state_masking.end_state_marker": ("tokens are masked by who wrote them, not by markers in the text"),
    "trainer.default_hdfs_dir": "checkpoints are not copied to HDFS; set trainer.default_local_dir to a shared folder",
}

# Loaders of the vLLM adapters that the published code carried.
OLD_LOAD_FORMATS = ("dummy_dtensor", "dummy_hf", "dummy_megatron", "dtensor", "hf", "megatron")


TOOLS = ("tools", "max_calls_per_turn", "max_calls", "max_invalid_turns")
"""The settings of the tools of `agent.format=chat`."""

TEMPLATE = ("thinking", "chat_template_kwargs")
"""The settings of the chat template."""

SUMMARIES = ("compact_at", "max_compactions", "max_summary_length", "train_summaries", "summary_request")
"""The settings of summaries."""


class Rule(NamedTuple):
    """`keys`: dotted paths, or the beginning of some (with a dot at the end). `unread`: whether nothing reads them."""

    keys: tuple[str, ...]
    unread: Callable[[Config], bool]
    why: str


def _scores_before(config: Config) -> bool:
    """Whether a pass over the policy precedes the update; see `Estimator.prepare`."""
    actor = config.actor_rollout_ref.actor
    needed = bool(policy_topk(actor)) or not actor.use_rollout_log_probs
    return needed and not scores_in_update(config)


def _own_environment(config: Config) -> bool:
    """Whether the environment is the user's own, so that nobody knows which settings it reads."""
    return config.agent.environment != Config().agent.environment


RULES = (
    Rule(
        (f"{ACTOR}.clip_ratio",),
        lambda c: None not in (c.actor_rollout_ref.actor.clip_ratio_low, c.actor_rollout_ref.actor.clip_ratio_high),
        "clip_ratio_low and clip_ratio_high are used instead of it",
    ),
    Rule(
        (f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
        lambda c: c.actor_rollout_ref.actor.policy_loss == "reinforce",
        f"{ACTOR}.policy_loss=reinforce has no ratio",
    ),
    Rule(
        (f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
        # A weight of 0 is what turned the KL off (`leave_out_unused_kl`).
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss and c.actor_rollout_ref.actor.kl_loss_coef > 0,
        f"{ACTOR}.use_kl_loss=False",
    ),
    Rule(
        (f"{ACTOR}.use_kl_iw", f"{ACTOR}.kl_iw_clip_lower", f"{ACTOR}.kl_iw_clip_upper"),
        lambda c: c.actor_rollout_ref.actor.use_kl_loss and not samples_kl(c.actor_rollout_ref.actor),
        "no part of the KL in the loss is estimated from sampled tokens (an exact KL, or a Top-k KL with "
        "kl_use_tail_sampling=False)",
    ),
    Rule((f"{CORRECTION}.importance_cap",), lambda c: _correction(c).importance == "none", "importance=none"),
    Rule(
        (f"{CORRECTION}.reject_low", f"{CORRECTION}.reject_high"),
        lambda c: _correction(c).reject == "none",
        "reject=none",
    ),
    Rule((f"{ACTOR}.llds_gate",), lambda c: not c.actor_rollout_ref.actor.llds_coef, f"{ACTOR}.llds_coef=0"),
    Rule(
        (f"{ACTOR}.shuffle",),
        lambda c: num_mini_batches(trajectories_per_step(c), c.actor_rollout_ref.actor.ppo_mini_batch_size) == 1,
        "a pass has one mini-batch",
    ),
    Rule(
        (f"{ACTOR}.ppo_micro_batch_size",),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        f"{ACTOR}.use_dynamic_bsz=True limits tokens instead",
    ),
    Rule(
        (f"{ACTOR}.ppo_max_token_len_per_gpu",),
        lambda c: not _limits_tokens(c),
        "use_dynamic_bsz=False limits trajectories instead",
    ),
    Rule((f"{REF}.path", f"{REF}.fsdp_config.param_offload"), lambda c: not has_anchor(c), "nothing uses an anchor"),
    Rule(
        (f"{REF}.fsdp_config.param_offload",),
        lambda c: has_anchor(c) and anchor_is_base(c),
        "the anchor is the policy without its adapters",
    ),
    Rule(
        tuple(f"{REF}.{name}" for name in PASS),
        lambda c: not (has_anchor(c) and needs_ref_log_probs(c)),
        "no pass over the anchor precedes the update",
    ),
    Rule(
        tuple(f"{ROLLOUT}.{name}" for name in PASS),
        lambda c: not _scores_before(c),
        "no pass over the policy precedes the update",
    ),
    Rule(
        ("critic.",),
        lambda c: not has_critic(c),
        "the advantage estimator has no critic",
    ),
    Rule(
        ("critic.ppo_micro_batch_size",),
        lambda c: has_critic(c) and c.critic.use_dynamic_bsz,
        "critic.use_dynamic_bsz=True limits tokens instead",
    ),
    Rule(
        ("critic.ppo_max_token_len_per_gpu",),
        lambda c: has_critic(c) and not c.critic.use_dynamic_bsz,
        "critic.use_dynamic_bsz=False limits trajectories instead",
    ),
    Rule(
        (
            "reward_model.model.",
            *(f"reward_model.{name}" for name in ("micro_batch_size", "max_length", "ulysses_sequence_parallel_size")),
            *(f"reward_model.{name}" for name in ("use_dynamic_bsz", "forward_max_token_len_per_gpu")),
        ),
        lambda c: not c.reward_model.enable,
        "reward_model.enable=False",
    ),
    Rule(
        tuple(f"agent.{name}" for name in (*TOOLS, *TEMPLATE)),
        lambda c: c.agent.format != "chat" and c.agent.program is None,
        "agent.format=tags has no tool calls",
    ),
    Rule(
        (
            *("agent.environment", "agent.format", "agent.feedback", "agent.tags_in_thoughts"),
            *(f"agent.{name}" for name in (*TOOLS, *SUMMARIES)),
            *(f"retriever.{name}" for name in ("engine", "topk", "timeout_s", "deadline_s", "max_batch")),
        ),
        lambda c: c.agent.program is not None,
        "agent.program plays the episodes",
    ),
    Rule(
        tuple(f"agent.{name}" for name in ("program_serves", "program_host", "endpoint")),
        lambda c: c.agent.program is None,
        "there is no agent.program",
    ),
    Rule(("agent.tools",), lambda c: c.agent.format == "chat" and not c.do_search, "do_search=False"),
    Rule(
        ("agent.feedback", "agent.tags_in_thoughts"),
        lambda c: c.agent.format == "chat",
        "agent.format=chat has no tags",
    ),
    Rule(
        tuple(f"agent.{name}" for name in SUMMARIES[1:]),
        lambda c: c.agent.compact_at is None,
        "agent.compact_at=null asks for no summary",
    ),
    Rule(("agent.compact_at",), lambda c: not c.do_search, "do_search=False plays a single turn"),
    Rule(("reward.port",), lambda c: c.reward.launch is None, "there is no reward.launch"),
    Rule(
        tuple(f"retriever.{name}" for name in ("url", "timeout_s", "max_batch")),
        lambda c: c.retriever.engine is not None and not _own_environment(c),
        "retriever.engine answers instead of the service",
    ),
    Rule(
        ("retriever.max_concurrent",),
        lambda c: c.retriever.engine is None and not _own_environment(c),
        "it is for a retriever.engine",
    ),
    Rule(
        tuple(f"retriever.{name}" for name in ("url", "engine", "topk", "timeout_s", "deadline_s", "max_batch")),
        lambda c: not c.do_search and not _own_environment(c),
        "do_search=False",
    ),
    Rule(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda c: c.algorithm.adv_estimator != "grpo" and not c.algorithm.norm_adv_by_batch_std,
        "only algorithm.adv_estimator=grpo divides by the deviation of a group",
    ),
    Rule(
        ("algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"),
        lambda c: not has_kl_in_reward(c) and c.algorithm.kl_ctrl.kl_coef > 0,
        "there is no KL in the reward (algorithm.use_kl_in_reward)",
    ),
    Rule(
        ("algorithm.ref_policy_ema_update_period",),
        lambda c: not anchor_moves(c),
        "the anchor does not move (algorithm.ref_policy_ema_tau)",
    ),
    Rule(
        ("algorithm.filter_groups.max_num_gen_batches",),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=False",
    ),
    Rule(
        ("data.curriculum.keep_probability", "data.curriculum.min_keep_probability"),
        lambda c: not c.data.curriculum.enable,
        "data.curriculum.enable=False",
    ),
    Rule(
        ("trainer.log_trajectories", "trainer.log_trajectories_freq"),
        lambda c: not {"wandb", "tensorboard"} & set(c.trainer.logger),
        "trainer.logger has neither wandb nor tensorboard",
    ),
    Rule(("trainer.metrics_host",), lambda c: c.trainer.metrics_port is None, "trainer.metrics_port is null"),
    Rule(("trainer.max_ckpt_to_keep",), lambda c: c.trainer.save_freq < 0, "trainer.save_freq=-1 saves the last step"),
    Rule(
        (f"{GUARD}.max_rollbacks",),
        lambda c: c.trainer.collapse_guard.action != "rollback",
        f"{GUARD}.action is not rollback",
    ),
    Rule(
        tuple(key for key in leaves(Config) if key.startswith(f"{GUARD}.") and not key.endswith(
            (".action", ".max_rollbacks")
        )),
        lambda c: c.trainer.collapse_guard.action == "off",
        f"{GUARD}.action=off",
    ),
)  # fmt: skip


def without_effect(config: Config) -> Iterator[str]:
    """One message for each rule whose settings were changed from their defaults although nothing reads them."""
    for rule in RULES:
        changed = [key.path for key in covered(rule) if is_changed(config, key)]
        if changed and rule.unread(config):
            values = ", ".join(f"{path}={value_at(config, path)}" for path in changed)
            yield f"without effect: {values}, since {rule.why}. Leave {'it' if len(changed) == 1 else 'them'} out."


def covered(rule: Rule) -> Iterator[Key]:
    """The settings that a rule is about."""
    for path, key in leaves(Config).items():
        if path in rule.keys or path.startswith(tuple(name for name in rule.keys if name.endswith("."))):
            yield key


def _correction(config: Config) -> RolloutCorrectionConfig:
    return config.actor_rollout_ref.actor.rollout_correction


def _limits_tokens(config: Config) -> bool:
    """Whether a pass of the actor, or one that follows its setting, is limited by tokens."""
    role = config.actor_rollout_ref
    return role.actor.use_dynamic_bsz or role.ref.log_prob_use_dynamic_bsz or role.rollout.log_prob_use_dynamic_bsz


# Published keys (or values of them) that have no effect here: setting one is an error that says what to use.


def inert_problems(config: Config) -> list[str]:
    """One message for each inert key that was set."""
    known = leaves(Config)
    changed = ((key, value_at(config, key), known[key].default) for key in INERT_KEYS)
    problems = [
        f"{key}={value} has no effect here: {INERT_KEYS[key]}. Leave it at {'null' if default is None else default}."
        for key, value, default in changed
        if value != default
    ]
    load_format = config.actor_rollout_ref.rollout.load_format
    if load_format in OLD_LOAD_FORMATS:
        problems.append(
            f"actor_rollout_ref.rollout.load_format={load_format} names a loader that vLLM no longer has: "
            "leave it out, which skips weights that the first sync replaces, or use auto"
        )
    return problems
