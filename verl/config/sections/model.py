"""Settings that every trained model has: where it is, how it is sharded, how it is optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.sections.fields import count, section, setting, share

Strategy = Literal["fsdp", "megatron"]
LoraTargets = str | list[str]


@dataclass
class ModelConfig:
    """A language model to start from."""

    path: str = setting(
        "~/models/deepseek-llm-7b-chat", "Folder in Hugging Face format, or hub name, of the initial model.", path=True
    )
    external_lib: str | list[str] | None = setting(
        None, "Python module, or list of modules, to import before the model is created (to register model classes)."
    )
    override_config: dict[str, Any] = setting({}, "Values that override those of the model's config.json.")
    enable_gradient_checkpointing: bool = setting(
        False, "Recompute activations in the backward pass: less memory, about a third more compute."
    )
    use_remove_padding: bool = setting(
        True,
        "Pack the rows of a micro-batch one after another instead of padding them to the longest (does not change "
        "the result). A model whose attention cannot separate packed rows is padded, with a warning.",
    )
    use_liger: bool | None = setting(
        None,
        "Compute norms, SwiGLU MLPs and rotary embeddings by Liger's fused kernels, on CUDA (docs/speed.md); null: "
        "where the package liger-kernel is installed.",
    )
    trust_remote_code: bool = setting(False, "Run Python code from the model's folder or repository.")
    lora_rank: int = setting(
        0,
        "Train low-rank adapters (LoRA) of this rank with the model's weights frozen; 0: train all weights. "
        "Adapters need a learning rate about 10 times as high.",
        ge=0,
    )
    lora_alpha: float = setting(16, "The output of adapters is multiplied by lora_alpha / lora_rank.", gt=0)
    target_modules: str | list[str] = setting(
        "all-linear",
        "Layers with adapters: all-linear (every linear layer of the decoder), or a list of names such as "
        "[q_proj,v_proj].",
    )
    trained_layers: int | None = count(
        None,
        "Number of decoder layers that are trained, the last ones (their adapters with lora_rank); all before them, "
        "the last norm and the head stay as they are, and the backward pass ends where they do. null: all are trained.",
    )


@dataclass
class OptimConfig:
    """AdamW and its schedule. After a linear warm-up, the learning rate is constant or decays (cosine)."""

    lr: float = setting(1e-6, "Learning rate after the warm-up.", ge=0)
    betas: tuple[float, float] = setting((0.9, 0.999), "AdamW decay rates of the two moments.", ge=0, lt=1)
    eps: float = setting(1e-8, "AdamW denominator offset.", gt=0)
    weight_decay: float = setting(0.01, "Decoupled weight decay, per unit of learning rate.", ge=0)
    lr_warmup_steps_ratio: float = share(0.0, "Share of the RL steps used for the linear warm-up.")
    warmup_style: Literal["constant", "cosine"] = setting("constant", "Schedule after the warm-up.")
    min_lr_ratio: float | None = share(
        None, "Learning rate at the end of a cosine schedule, as a share of lr; null: 0."
    )
    total_training_steps: int = setting(
        -1, "Length of the schedule in RL steps; -1: the run's own number of steps.", ge=-1
    )


@dataclass
class WrapPolicyConfig:
    """The modules that are sharded as one unit."""

    min_num_params: int = setting(
        0, "Transformer layers with fewer parameters are not sharded as a unit of their own; 0: all are.", ge=0
    )


@dataclass
class MixedPrecisionConfig:
    """Number formats of the sharded forward and backward pass. The optimizer always keeps float32."""

    param_dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Number format of the parameters in the forward and backward pass; auto: bfloat16 on CUDA, and on a CPU that "
        "multiplies it in hardware if the model has at least 50 M parameters; else float32.",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = setting("float32", "Number format of the gradient reduction.")


@dataclass
class FsdpConfig:
    """Sharding (FSDP2) of a trained model. The `*_offload` keys free GPU memory between the phases of a step."""

    param_offload: bool = setting(
        False, "Keep the parameters in pinned host memory while the engines sample and other roles work."
    )
    grad_offload: bool = setting(
        False, "The same for gradients that remain after an update; those of a finished update are freed anyway."
    )
    optimizer_offload: bool = setting(
        False, "Keep the optimizer state in pinned host memory while this model is not updated."
    )
    fsdp_size: int = setting(
        -1,
        "Number of workers that share one copy of the model. -1: all workers share one copy. The number of GPUs per"
        " node (hybrid sharding, HSDP): weights are gathered within a node and only gradients are summed between "
        "nodes, at the cost of one copy per node.",
        ge=-1,
    )
    reduce_gradients: Literal["micro_batch", "mini_batch"] = setting(
        "micro_batch",
        "When gradients are reduced over the workers that share a copy: after every micro-batch, or once per mini-"
        "batch. The latter sends less, but every worker keeps the whole model's gradient until then "
        "(docs/speed.md).",
    )
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig)


@dataclass
class FrozenFsdpConfig:
    """Sharding of a model that is not trained."""

    param_offload: bool = setting(False, "Keep the parameters in pinned host memory while they are not used.")
    fsdp_size: int = setting(
        -1,
        "Number of workers that share one copy of the model; must be that of the actor.",
        ge=-1,
        shown="${actor_rollout_ref.actor.fsdp_config.fsdp_size}",
    )
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
