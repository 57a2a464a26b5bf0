"""From settings to a sharded model: import what is asked for, load, shard."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from verl.config.model import FrozenFsdpConfig, FsdpConfig, MixedPrecisionConfig, ModelConfig
from verl.engine.device import device_mesh, prepare_matmul, resolve_precision
from verl.engine.model import CausalModel, load_causal_lm
from verl.engine.sharding import shard
from verl.errors import ConfigError


def load_sharded(
    path: str,
    settings: ModelConfig,
    fsdp: FsdpConfig | FrozenFsdpConfig,
    mixed: MixedPrecisionConfig,
    device: torch.device,
    head_chunk_tokens: int,
    trained: bool,
) -> CausalModel:
    """The model at `path`, sharded over all ranks; without `trained` it has no gradients.

    On CUDA `param_offload` or `optimizer_offload` keeps shards, gradients and optimizer state in CPU memory: FSDP2
    keeps the three together. Gradients live from backward to step only, so `grad_offload` alone has nothing to move.
    Raises ConfigError.
    """
    if fsdp.fsdp_size not in (-1, dist.get_world_size()):
        raise ConfigError(f"fsdp_size is {fsdp.fsdp_size}; only -1 (all {dist.get_world_size()} workers) works")
    libraries = [settings.external_lib] if isinstance(settings.external_lib, str) else settings.external_lib or []
    for name in libraries:
        importlib.import_module(name)
    checkpointing = trained and settings.enable_gradient_checkpointing
    hf_model = load_causal_lm(path, device, settings.override_config, settings.trust_remote_code, checkpointing)
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    prepare_matmul(device, precision)
    model = CausalModel(hf_model, head_chunk_tokens)
    model.requires_grad_(trained)
    offload = fsdp.param_offload or (isinstance(fsdp, FsdpConfig) and fsdp.optimizer_offload)
    shard(model, device_mesh(device), precision, offload, fsdp.wrap_policy.min_num_params)
    return model
