"""From settings to a sharded model: import user modules, load, shard."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from verl.config.sections.critic import CriticModelConfig
from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig, MixedPrecisionConfig, ModelConfig
from verl.engine.device.linear import use_onednn
from verl.engine.device.runtime import (
    Precision,
    device_mesh,
    kind_of,
    prepare_matmul,
    resolve_head_dtype,
    resolve_precision,
)
from verl.engine.device.sharding import shard
from verl.engine.files.slices import find_slices
from verl.engine.fused_layers import use_fused_layers
from verl.engine.hf_model import HfModel, decoder_layers
from verl.engine.lora import Lora, add_adapters, begin_adapters
from verl.engine.model import CausalLm, CausalModel, Decoder
from verl.engine.value_model import TokenClassifier, ValueModel
from verl.errors import CheckpointError, ConfigError, translated

D = TypeVar("D", bound=Decoder)


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

    `seed` initializes adapters. Raises ConfigError.
    """
    hf = CausalLm.of(path, settings, device, trained)
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    head = head_chunk_tokens, resolve_head_dtype(device, head_dtype, precision)
    return _load(hf, lambda model: CausalModel(model, *head), settings, fsdp, precision, trained, seed)


def load_sharded_critic(settings: CriticModelConfig, device: torch.device, seed: int = 0) -> ValueModel:
    """The value model that `settings` describe, sharded. `seed` initializes adapters. Raises ConfigError."""
    hf = TokenClassifier.of(settings.path, settings, device, trained=True)
    mixed = settings.fsdp_config.mixed_precision
    precision = resolve_precision(device, mixed.param_dtype, mixed.reduce_dtype)
    return _load(hf, ValueModel, settings, settings.fsdp_config, precision, True, seed)


def _load(
    hf: HfModel,
    wrap: Callable[[PreTrainedModel], D],
    settings: ModelConfig,
    fsdp: FsdpConfig | FrozenFsdpConfig,
    precision: Precision,
    trained: bool,
    seed: int,
) -> D:
    """A model that is built blank, sharded, then filled slice by slice; loaded whole if its files cannot be sliced."""
    # Without memory for weights, unless the files must be read as a whole.
    import_modules(settings.external_lib)
    hf_model = hf.blank()
    with _damage_is_named():
        slices = find_slices(hf_model, hf.source, hf.new_head)
    if slices is None:
        hf_model = hf.whole()

    # Everything that changes the layers comes before they are sharded.
    hf_model.requires_grad_(trained)
    use_fused_layers(hf_model, settings.use_liger, hf.device)
    lora = Lora.from_config(settings) if trained else None
    if lora is not None:
        add_adapters(hf_model, lora, precision.param_dtype, None if slices is None else slices.stored)
    model = wrap(hf_model)
    prepare_matmul(hf.device, precision)
    if kind_of(hf.device) == "cpu":
        use_onednn(model)

    # Weights are read into this rank's shards; adapters are in no file.
    mesh = device_mesh(hf.device, fsdp.fsdp_size)
    shard(model, decoder_layers(model.model), mesh, precision, fsdp.wrap_policy.min_num_params)
    if slices is not None:
        with _damage_is_named():
            slices.fill(model, hf.device)
    begin_adapters(model.model, seed)
    return model


def import_modules(external_lib: str | list[str] | None) -> None:
    """Import the modules that register model classes (`external_lib` of a model's settings)."""
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        importlib.import_module(name)


def _damage_is_named() -> contextlib.AbstractContextManager[None]:
    """Context that raises ConfigError for files that cannot be read: at the start of a run its settings are wrong."""
    return translated(CheckpointError, lambda error: ConfigError(f"cannot load the model: {error}"))
