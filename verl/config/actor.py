"""Settings of the actor (the trained policy) and of its reference, the anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.algorithm import SampledKl
from verl.config.fields import section, setting
from verl.config.model import FrozenFsdpConfig, FsdpConfig, ModelConfig, OptimConfig, Strategy
from verl.config.rollout import LogProbConfig, RolloutConfig

KlLossType = SampledKl | Literal["full_forward", "full_reverse"]
FoundIn = Literal["auto", "score", "update"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass
class RolloutCorrectionConfig:
    """What to do about the sampler's probabilities being a little different from the trainer's.

    The ratio is pi_old (trainer) / pi_rollout (sampler), of a token or, multiplied up, of a trajectory.
    """

    importance: Literal["none", "token", "sequence"] = setting(
        "none", "Weight the policy loss by the ratio, cut at importance_cap (truncated importance sampling)."
    )
    importance_cap: float = setting(2.0, "Largest weight.", gt=0)
    reject: Literal["none", "token", "sequence", "geometric"] = setting(
        "none", "Leave out tokens, or whole trajectories (geometric: by their mean ratio), outside reject_low..high."
    )
    reject_low: float = setting(0.5, "Smallest ratio that stays in the loss.", ge=0)
    reject_high: float = setting(2.0, "Largest ratio that stays in the loss.", gt=0)


@dataclass
class ActorConfig:
    """The policy update. Batch sizes count trajectories over all workers."""

    strategy: Strategy = setting("fsdp", "How the model is sharded; only fsdp is available.")
    ppo_mini_batch_size: int = setting(
        256,
        "Trajectories per optimiser step, over all workers: those of a step are cut evenly into as many mini-batches "
        "as come nearest to it.",
        ge=1,
    )
    ppo_micro_batch_size: int = setting(
        64, "Most trajectories per forward and backward pass, over all workers (no influence on the result).", ge=1
    )
    use_dynamic_bsz: bool = setting(
        False, "Bound a forward and backward pass by ppo_max_token_len_per_gpu instead of by trajectories."
    )
    ppo_max_token_len_per_gpu: int = setting(16384, "Most tokens per worker in one forward and backward pass.", ge=1)
    grad_clip: float = setting(1.0, "Largest gradient norm; a larger one is scaled down to it.", gt=0)
    state_masking: bool = setting(
        True,
        "Leave retrieved and feedback text out of every loss. True here (published: False, and true in every "
        "published command); false is not available.",
    )
    clip_ratio: float = setting(0.2, "PPO clip range of the probability ratio.", ge=0)
    clip_ratio_low: float | None = setting(None, "Lower clip range; null: clip_ratio.", ge=0)
    clip_ratio_high: float | None = setting(None, "Upper clip range; null: clip_ratio.", ge=0)
    clip_ratio_c: float | None = setting(
        None, "Dual clip: bound of the loss for negative advantages, as a probability ratio; null: none.", gt=1
    )
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = setting(
        "ppo",
        "Policy loss: clipped ratio per token, per sequence (gspo, with seq-mean-token-mean), clipped weight (cispo), "
        "or none (reinforce, for one optimiser step on a step's trajectories).",
    )
    loss_agg_mode: LossAggMode = setting(
        "token-mean", "How token losses are put together over a mini-batch (verl/algorithms/aggregation.py)."
    )
    loss_scale_factor: int | None = setting(
        None, "seq-mean-token-sum-norm (Dr.GRPO): the constant number of tokens to divide by.", ge=1
    )
    entropy_coeff: float = setting(0.001, "Weight of the entropy bonus.")
    use_kl_loss: bool = setting(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = setting(0.001, "Weight of the KL in the loss.", ge=0)
    kl_loss_type: KlLossType = setting(
        "low_var_kl",
        "KL estimator in the loss (kl = k1, mse = k2, low_var_kl = k3; NAME+: its value with k2's gradient; "
        "full_*: over the vocabulary). k1 is for comparison: its gradient is 0 on average.",
    )
    kl_topk_tokens: int | None = setting(
        None, "Tokens summed exactly by full_*; the rest is estimated from the sample. null or <= 0: all tokens."
    )
    kl_topk_gradient: Literal["corrected", "published"] = setting(
        "corrected", "Top-k KL: unbiased gradient, or the published one (docs/topk_kl.md)."
    )
    kl_use_tail_sampling: bool = setting(True, "Top-k KL: add the sampled estimate of the tail.")
    use_kl_iw: bool = setting(
        False, "Weight sampled KL terms by pi_theta / pi_old. The exact KL has no sampled term, so nothing changes."
    )
    kl_iw_clip_upper: float | None = setting(None, "Upper bound of that weight; null: none.", gt=0)
    kl_iw_clip_lower: float | None = setting(None, "Lower bound of that weight; null: none.", ge=0)
    ppo_epochs: int = setting(1, "Passes over a step's trajectories.", ge=1)
    shuffle: bool = setting(False, "Draw the mini-batches of a pass in random order (seeded by trainer.seed).")
    ulysses_sequence_parallel_size: int = setting(
        1,
        "Workers that share each sequence, a slice of its tokens for each (Ulysses); divides the workers and the "
        "model's attention heads (docs/long_context.md).",
        ge=1,
    )
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FsdpConfig = section(FsdpConfig)
    num_threads: int | None = setting(None, "CPU threads of each worker; null: the node's cores by its workers.", ge=1)
    head_chunk_tokens: int | None = setting(
        None,
        "Tokens per chunk of the vocabulary projection; bounds memory, no influence on the result. null: as many as "
        "have 512 MiB of logits on CUDA, 8 MiB on CPU, at least 64.",
        ge=1,
    )
    head_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Format of the factors of the vocabulary projection, of policy and anchor; sums, softmax and losses are "
        "float32 in any case. auto: bfloat16 on CUDA where the forward pass runs in it, else float32.",
    )
    use_rollout_log_probs: bool = setting(
        False, "Take the sampler's log-probs as those of the old policy instead of recomputing them."
    )
    old_log_probs: FoundIn = setting(
        "auto",
        "Which forward pass gives the old policy's log-probs, entropy and Top-k tokens: one before the update (score), "
        "or the update's own (update), for one optimiser step per RL step: the policy has not moved until then. auto: "
        "update where nothing needs them earlier (docs/speed.md).",
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    llds_coef: float = setting(
        0.0, "Weight of the likelihood-preserving regulariser (LLDS, arXiv 2512.04220) against GRPO's collapse.", ge=0
    )
    llds_gate: Literal["action", "response"] = setting(
        "action", "LLDS acts where the likelihood of a whole turn (action) or trajectory (response) fell."
    )


@dataclass
class RefConfig(LogProbConfig):
    """The reference policy (the anchor), which lives beside the actor."""

    path: str | None = setting(
        None,
        "Folder or hub name of the anchor's first weights (a saved ref/global_step_N); null: the actor's.",
        path=True,
    )
    log_probs: FoundIn = setting(
        "auto",
        "Where the log-probs of a sampled KL in the loss (use_kl_loss) come from: a pass over all trajectories before "
        "the update (score), or forward passes beside those of the policy within the update (update). auto: update for "
        "ppo_epochs=1 and no param_offload (docs/speed.md).",
    )
    ulysses_sequence_parallel_size: int = setting(
        1,
        "Workers that share one sequence.",
        ge=1,
        shown="${actor_rollout_ref.actor.ulysses_sequence_parallel_size}",
    )
    fsdp_config: FrozenFsdpConfig = section(FrozenFsdpConfig)


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained, sampled, and kept as the reference."""

    hybrid_engine: bool = setting(True, "Actor, sampler and reference share the same devices; must be True.")
    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
