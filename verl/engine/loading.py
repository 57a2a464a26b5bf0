"""From settings to a sharded model: import what is asked for, load, shard."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from verl.config.critic import CriticModelConfig
from verl.config.model import FrozenFsdpConfig, FsdpConfig, MixedPrecisionConfig, ModelConfig
from verl.engine.device import device_mesh, prepare_matmul, resolve_precision
from verl.engine.model import CausalModel, Decoder, load_causal_lm
from verl.engine.sharding import shard
from verl.engine.value_model import ValueModel, load_token_classifier
from verl.errors import ConfigError


def load_sharded(
    path: str,
    settings: ModelConfig,
    fsdp: FsdpConfig | FrozenFsdpConfig,
    mixed: MixedPrecisionConfig,
    device: torch.device,
    head_chunk_tokens: int | None,
    trained: bool,
) -> CausalModel:
    """The language model at `path`, sharded; without `trained` it has no gradients. Raises ConfigError."""
    _prepare(settings.external_lib, fsdp)
    checkpointing = trained and settings.enable_gradient_checkpointing
    hf_model = load_causal_lm(path, device, settings.override_config, settings.trust_remote_code, checkpointing)
    model = CausalModel(hf_model, head_chunk_tokens)
    model.requires_grad_(trained)
    _shard(model, fsdp, mixed, device)
    return model


def load_sharded_critic(settings: CriticModelConfig, device: torch.device) -> ValueModel:
    """The value model that `settings` describe, sharded. Raises ConfigError."""
    _prepare(settings.external_lib, settings.fsdp_config)
    checkpointing = settings.enable_gradient_checkpointing
    hf_model = load_token_classifier(
        settings.path, device, settings.override_config, settings.trust_remote_code, checkpointing
    )
    model = ValueModel(hf_model)
    _shard(model, settings.fsdp_config, settings.fsdp_config.mixed_precision, device)
    return model


def _prepare(external_lib: str | list[str] | None, fsdp: FsdpConfig | FrozenFsdpConfig) -> None:
    if fsdp.fsdp_size not in (-1, dist.get_world_size()):
        raise ConfigError(f"fsdp_size is {fsdp.fsdp_size}; only -1 (all {dist.get_world_size()} workers) works")
    import_modules(external_lib)


def import_modules(external_lib: str | list[str] | None) -> None:
    """Import what registers model classes (`external_lib` of a model's settings)."""
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        importlib.import_module(name)


def _shard(
    model: Decoder, fsdp: FsdpConfig | FrozenFsdpConfig, mixed: MixedPrecisionConfig, device: torch.device
) -> None:
    """On CUDA `param_offload` or `optimizer_offload` keeps shards, gradients and optimizer state in CPU memory.

    FSDP2 keeps the three together; gradients live from backward to step only, so `grad_offload` alone moves nothing.
    """
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    prepare_matmul(device, precision)
    offload = fsdp.param_offload or (isinstance(fsdp, FsdpConfig) and fsdp.optimizer_offload)
    shard(model, device_mesh(device), precision, offload, fsdp.wrap_policy.min_num_params)
