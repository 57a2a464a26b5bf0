"""Settings of the actor (the trained policy) and of its reference, the anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config.sections.algorithm import SampledKl
from verl.config.sections.fields import count, section, setting
from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig, ModelConfig, OptimConfig, Strategy
from verl.config.sections.rollout import LogProbConfig, RolloutConfig

KlLossType = SampledKl | Literal["full_forward", "full_reverse"]
FoundIn = Literal["auto", "score", "update"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@dataclass
class RolloutCorrectionConfig:
    """How to correct for the small difference between the rollout engine's probabilities and the trainer's.

    The ratio is pi_old (trainer) / pi_rollout (rollout engine), of a token or, as a product, of a trajectory.
    """

    importance: Literal["none", "token", "sequence"] = setting(
        "none", "Weight the policy loss by the ratio, capped at importance_cap (truncated importance sampling)."
    )
    importance_cap: float = setting(2.0, "Largest weight.", gt=0)
    reject: Literal["none", "token", "sequence", "geometric"] = setting(
        "none",
        "Leave out tokens or whole trajectories whose ratio (geometric: the mean ratio of a trajectory) is outside "
        "reject_low to reject_high.",
    )
    reject_low: float = setting(0.5, "Smallest ratio that is kept in the loss.", ge=0)
    reject_high: float = setting(2.0, "Largest ratio that is kept in the loss.", gt=0)


@dataclass
class ActorConfig:
    """The policy update. Batch sizes count trajectories over all workers."""

    strategy: Strategy = setting("fsdp", "How the model is sharded; only fsdp is available.")
    ppo_mini_batch_size: int = count(
        256,
        "Trajectories per optimizer step, over all workers. The trajectories of an RL step are split evenly into "
        "the number of mini-batches that comes closest to this size.",
    )
    ppo_micro_batch_size: int = count(
        64,
        "Maximum number of trajectories per forward and backward pass, over all workers (does not change the result).",
    )
    use_dynamic_bsz: bool = setting(
        False,
        "Limit a forward and backward pass by ppo_max_token_len_per_gpu instead of by the number of trajectories.",
    )
    ppo_max_token_len_per_gpu: int = count(
        16384, "Maximum number of tokens per worker in one forward and backward pass."
    )
    grad_clip: float = setting(1.0, "Maximum gradient norm; a larger gradient is scaled down to it.", gt=0)
    state_masking: bool = setting(
        True,
        "Mask retrieved text and feedback out of every loss. Always true: false is not available. (In Search-R1 the"
        " default is false, and every published command sets true.)",
    )
    clip_ratio: float = setting(0.2, "PPO clip range of the probability ratio.", ge=0)
    clip_ratio_low: float | None = setting(None, "Lower clip range; null: clip_ratio.", ge=0)
    clip_ratio_high: float | None = setting(None, "Upper clip range; null: clip_ratio.", ge=0)
    clip_ratio_c: float | None = setting(
        None, "Dual clip: limit of the loss for negative advantages, as a probability ratio; null: none.", gt=1
    )
    policy_loss: Literal["ppo", "gspo", "cispo", "reinforce"] = setting(
        "ppo",
        "Policy loss: ppo clips the ratio of each token, gspo that of a sequence (use with seq-mean-token-mean), "
        "cispo clips the weight of a token, reinforce has no ratio (for one optimizer step per RL step).",
    )
    loss_agg_mode: LossAggMode = setting(
        "token-mean", "How token losses are aggregated over a mini-batch (verl/algorithms/aggregation.py)."
    )
    loss_scale_factor: int | None = count(
        None, "For seq-mean-token-sum-norm (Dr.GRPO): the constant number of tokens to divide by."
    )
    entropy_coeff: float = setting(0.001, "Coefficient of the entropy bonus.")
    use_kl_loss: bool = setting(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = setting(0.001, "Coefficient of the KL in the loss; at 0 there is none.", ge=0)
    kl_loss_type: KlLossType = setting(
        "low_var_kl",
        "KL estimator in the loss: kl = k1, mse = k2, low_var_kl = k3; NAME+ has the value of NAME and the gradient"
        " of k2; full_* sums over the vocabulary. k1 is for comparison only: its gradient is 0 on average.",
    )
    kl_topk_tokens: int | None = setting(
        None,
        "For full_*: number of tokens that are summed exactly (Top-k KL); the rest is estimated from the sampled "
        "token. null or <= 0: all tokens.",
    )
    kl_topk_gradient: Literal["corrected", "published"] = setting(
        "corrected", "Gradient of the Top-k KL: unbiased (corrected), or as in the published code (docs/topk_kl.md)."
    )
    kl_use_tail_sampling: bool = setting(True, "Top-k KL: add the estimate of the tail from the sampled token.")
    use_kl_iw: bool = setting(
        False,
        "Weight sampled KL terms by pi_theta / pi_rollout, the probability that the rollout engine sampled the token "
        "with. No effect on the exact KL, which has no sampled term.",
    )
    kl_iw_clip_upper: float | None = setting(None, "Upper limit of that weight; null: none.", gt=0)
    kl_iw_clip_lower: float | None = setting(None, "Lower limit of that weight; null: none.", ge=0)
    ppo_epochs: int = count(1, "Number of passes over the trajectories of a step.")
    shuffle: bool = setting(False, "Shuffle the mini-batches of a pass (seeded by trainer.seed).")
    ulysses_sequence_parallel_size: int = count(
        1,
        "Number of workers that share each sequence, each with a slice of its tokens (Ulysses). Must divide the "
        "number of workers and of the model's attention heads (docs/models.md#long-contexts).",
    )
    use_prefix_grouper: bool = setting(
        True,
        "Compute a prompt that several rows of a micro-batch begin with once, for policy and anchor (does not change "
        "the result). Needs packed rows; without effect where workers share sequences (Ulysses).",
    )
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FsdpConfig = section(FsdpConfig)
    num_threads: int | None = count(None, "CPU threads of each worker; null: the node's cores divided by its workers.")
    head_chunk_tokens: int | None = count(
        None,
        "Tokens per chunk of the vocabulary projection; limits memory and does not change the result. null: as many"
        " as give 512 MiB of logits on CUDA or 8 MiB on CPU, at least 64.",
    )
    head_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Number format of the factors of the vocabulary projection, for policy and anchor; sums, softmax and losses"
        " are always float32. auto: bfloat16 if the forward pass uses it, else float32.",
    )
    use_rollout_log_probs: bool = setting(
        False, "Use the rollout engine's log-probs as those of the old policy instead of recomputing them."
    )
    old_log_probs: FoundIn = setting(
        "auto",
        "Which forward pass computes the old policy's log-probs, entropy and Top-k tokens: a separate one before "
        "the update (score), or the update's own (update). update needs one optimizer step per RL step, so that the"
        " policy has not changed yet. auto: update if nothing needs them earlier (docs/speed.md).",
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    llds_coef: float = setting(
        0.0,
        "Coefficient of the likelihood-preserving regularizer against GRPO's collapse (LLDS, arXiv 2512.04220). Needs "
        "several optimizer steps per RL step, as it acts on what earlier ones did.",
        ge=0,
    )
    llds_gate: Literal["action", "response"] = setting(
        "action", "LLDS acts where the likelihood of a whole turn (action) or of the trajectory (response) fell."
    )


@dataclass
class RefConfig(LogProbConfig):
    """The reference policy (the anchor), on the actor's devices."""

    path: str | None = setting(
        None,
        "Folder or hub name of the anchor's initial weights (a saved ref/global_step_N); null: the actor's.",
        path=True,
    )
    log_probs: FoundIn = setting(
        "auto",
        "Where the log-probs for a sampled KL in the loss (use_kl_loss) come from: a pass over all trajectories "
        "before the update (score), or forward passes next to those of the policy during the update (update). auto:"
        " update if ppo_epochs=1 and param_offload is off (docs/speed.md).",
    )
    ulysses_sequence_parallel_size: int = count(
        1,
        "Number of workers that share each sequence.",
        shown="${actor_rollout_ref.actor.ulysses_sequence_parallel_size}",
    )
    fsdp_config: FrozenFsdpConfig = section(FrozenFsdpConfig)


@dataclass
class ActorRolloutRefConfig:
    """The policy in its three roles: trained, sampled from, and kept as the reference."""

    hybrid_engine: bool = setting(
        True, "Has no effect and must be true; trainer.layout decides whether engines and trainer share devices."
    )
    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
