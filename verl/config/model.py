"""Settings that every trained model has: where it is, how it is sharded, how it is optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.fields import section, setting

Strategy = Literal["fsdp", "megatron"]
LoraTargets = str | list[str]


@dataclass
class ModelConfig:
    """A language model to start from."""

    path: str = setting(
        "~/models/deepseek-llm-7b-chat", "Folder in Hugging Face format, or hub name, to start from.", path=True
    )
    external_lib: str | list[str] | None = setting(
        None, "Python module, or list of modules, imported before the model is made (to register model classes)."
    )
    override_config: dict[str, Any] = setting({}, "Values that replace those of the model's config.json.")
    enable_gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: less memory, about a third more compute."
    )
    use_remove_padding: bool = setting(
        True,
        "Pack the rows of a micro-batch one after the other instead of padding them to the longest (no influence on "
        "the result). A model whose attention cannot tell packed rows apart is padded, with a warning.",
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model's files.")
    lora_rank: int = setting(
        0,
        "Train low-rank adapters (LoRA) of this rank beside frozen weights; 0: train all weights. Adapters want a "
        "learning rate about 10 times as high.",
        ge=0,
    )
    lora_alpha: float = setting(16, "Adapters are multiplied by lora_alpha / lora_rank.", gt=0)
    target_modules: str | list[str] = setting(
        "all-linear",
        "Layers with adapters: all-linear (every linear layer of the decoder), or a list of names such as "
        "[q_proj,v_proj].",
    )


@dataclass
class OptimConfig:
    """AdamW and its schedule. The learning rate is constant or decays (cosine) after a linear warm-up."""

    lr: float = setting(1e-6, "Learning rate after the warm-up.", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW decay rates of the two moments.", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW denominator offset.", gt=0)
    weight_decay: float = setting(0.01, "Decoupled weight decay, per unit of learning rate.", ge=0)
    lr_warmup_steps_ratio: float = setting(0.0, "Share of the RL steps spent in the linear warm-up.", ge=0, le=1)
    warmup_style: Literal["constant", "cosine"] = setting("constant", "Schedule after the warm-up.")
    min_lr_ratio: float | None = setting(
        None, "Learning rate at the end of a cosine schedule, as a share of lr; null: 0.", ge=0, le=1
    )
    total_training_steps: int = setting(
        -1, "Length of the schedule in RL steps; -1: the run's own number of steps.", ge=-1
    )


@dataclass
class WrapPolicyConfig:
    """Which modules become one shard unit each."""

    min_num_params: int = setting(
        0, "A transformer layer with fewer parameters than this is not a unit of its own; 0: each one is.", ge=0
    )


@dataclass
class MixedPrecisionConfig:
    """Number formats of the sharded forward and backward pass. The optimiser always keeps float32."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "Format of parameters in the forward and backward pass; auto: bfloat16 on CUDA, float32 on CPU."
    )
    reduce_dtype: Literal["float32", "bfloat16"] = setting("float32", "Format of the gradient reduction.")


@dataclass
class FsdpConfig:
    """Sharding (FSDP2) of a trained model. On a GPU the `*_offload` keys free it between the phases of a step."""

    param_offload: bool = setting(
        False, "Keep the parameters in pinned host memory while the engines sample and other roles work."
    )
    grad_offload: bool = setting(
        False, "The same for gradients that are left after an update; those of a finished one are freed anyway."
    )
    optimizer_offload: bool = setting(
        False, "Keep the optimizer's state in pinned host memory while no update of this model runs."
    )
    fsdp_size: int = setting(
        -1,
        "Workers that share one copy of the model (HSDP): n_gpus_per_node gathers weights within a node only, and sums "
        "gradients over nodes, at the memory of a copy per node. -1: all workers share one.",
        ge=-1,
    )
    reduce_gradients: Literal["micro_batch", "mini_batch"] = setting(
        "micro_batch",
        "When gradients are reduced over the workers that share a copy: after every micro-batch, or once per "
        "mini-batch: less is sent, but every worker keeps the whole model's gradient meanwhile (docs/speed.md).",
    )
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig)


@dataclass
class FrozenFsdpConfig:
    """Sharding of a model that is only evaluated."""

    param_offload: bool = setting(False, "Keep the parameters in pinned host memory while nothing reads them.")
    fsdp_size: int = setting(
        -1,
        "Workers that share one copy of the model; as many as of the actor, shard by shard.",
        ge=-1,
        shown="${actor_rollout_ref.actor.fsdp_config.fsdp_size}",
    )
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
