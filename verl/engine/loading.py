"""From settings to a sharded model: import what is asked for, load, shard."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from verl.config.critic import CriticModelConfig
from verl.config.model import FrozenFsdpConfig, FsdpConfig, MixedPrecisionConfig, ModelConfig
from verl.engine.device import device_mesh, prepare_matmul, resolve_head_dtype, resolve_precision
from verl.engine.hf_model import HfModel
from verl.engine.lora import Lora, add_adapters, begin_adapters
from verl.engine.model import CausalLm, CausalModel, Decoder
from verl.engine.sharding import shard
from verl.engine.slices import Slices, find_slices
from verl.engine.value_model import TokenClassifier, ValueModel
from verl.errors import CheckpointError, ConfigError


def load_sharded(
    path: str,
    settings: ModelConfig,
    fsdp: FsdpConfig | FrozenFsdpConfig,
    mixed: MixedPrecisionConfig,
    device: torch.device,
    head_chunk_tokens: int | None,
    trained: bool,
    head_dtype: str = "auto",
    seed: int = 0,
) -> CausalModel:
    """The language model at `path`, sharded; without `trained` it has no gradients, and no adapters.

    `seed` is for the first values of adapters. Raises ConfigError.
    """
    import_modules(settings.external_lib)
    checkpointing = trained and settings.enable_gradient_checkpointing
    hf = CausalLm(path, device, settings.override_config, settings.trust_remote_code, checkpointing)
    hf_model, slices = _begun(hf)
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    head = head_chunk_tokens, resolve_head_dtype(device, head_dtype, precision)
    lora = Lora.from_config(settings) if trained else None
    hf_model.requires_grad_(trained)
    if lora is not None:
        add_adapters(hf_model, lora, precision.param_dtype, None if slices is None else slices.stored)
    model = CausalModel(hf_model, *head)
    _shard(model, fsdp, mixed, device)
    _fill(model, slices, device)
    begin_adapters(model.model, seed)
    return model


def load_sharded_critic(settings: CriticModelConfig, device: torch.device, seed: int = 0) -> ValueModel:
    """The value model that `settings` describe, sharded. `seed` is for adapters. Raises ConfigError."""
    import_modules(settings.external_lib)
    checkpointing = settings.enable_gradient_checkpointing
    hf = TokenClassifier(settings.path, device, settings.override_config, settings.trust_remote_code, checkpointing)
    hf_model, slices = _begun(hf, new_head=True)
    mixed = settings.fsdp_config.mixed_precision
    lora = Lora.from_config(settings)
    if lora is not None:
        add_adapters(hf_model, lora, resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype).param_dtype)
    model = ValueModel(hf_model)
    _shard(model, settings.fsdp_config, mixed, device)
    _fill(model, slices, device)
    begin_adapters(model.model, seed)
    return model


def _begun(hf: HfModel, new_head: bool = False) -> tuple[PreTrainedModel, Slices | None]:
    """Blank, with where its weights lie; loaded whole where they cannot be read by slices."""
    blank = hf.blank()
    with _damage_is_named():
        slices = find_slices(blank, hf.source, new_head)
    return (hf.whole() if slices is None else blank), slices


def import_modules(external_lib: str | list[str] | None) -> None:
    """Import what registers model classes (`external_lib` of a model's settings)."""
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        importlib.import_module(name)


def _shard(
    model: Decoder, fsdp: FsdpConfig | FrozenFsdpConfig, mixed: MixedPrecisionConfig, device: torch.device
) -> None:
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    prepare_matmul(device, precision)
    shard(model, device_mesh(device, fsdp.fsdp_size), precision, fsdp.wrap_policy.min_num_params)


def _fill(model: Decoder, slices: Slices | None, device: torch.device) -> None:
    """Read the slices of a model that is not loaded yet. Raises ConfigError."""
    if slices is not None:
        with _damage_is_named():
            slices.fill(model, device)


@contextlib.contextmanager
def _damage_is_named() -> Iterator[None]:
    """What cannot be read when a run starts is a mistake in its settings."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"cannot load the model: {error}") from error
