"""From settings to a sharded model (import user modules, load, shard), and the sizes of a model, from its config.json
alone.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.config import Config
from verl.config.sections.critic import CriticModelConfig
from verl.config.sections.model import FrozenFsdpConfig, FsdpConfig, MixedPrecisionConfig, ModelConfig
from verl.engine.device.runtime import (
    Precision,
    device_mesh,
    kind_of,
    prepare_matmul,
    resolve_head_dtype,
    resolve_precision,
    use_onednn,
)
from verl.engine.device.sharding import num_parameters, shard
from verl.engine.files.slices import find_slices
from verl.engine.fused_layers import use_fused_layers
from verl.engine.hf_model import HfModel, decoder_layers, freeze_base, head_size, last_layers, text_layers
from verl.engine.lora import Lora, add_adapters, begin_adapters
from verl.engine.model import CausalLm, CausalModel, Decoder, TokenClassifier, ValueModel
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

    def wrap(model: PreTrainedModel, precision: Precision) -> CausalModel:
        return CausalModel(model, head_chunk_tokens, resolve_head_dtype(head_dtype, precision))

    return _load(hf, wrap, settings, fsdp, mixed, trained, seed)


def load_sharded_critic(settings: CriticModelConfig, device: torch.device, seed: int = 0) -> ValueModel:
    """The value model that `settings` describe, sharded. `seed` initializes adapters. Raises ConfigError."""
    hf = TokenClassifier.of(settings.path, settings, device, trained=True)
    fsdp = settings.fsdp_config
    return _load(hf, lambda model, _: ValueModel(model), settings, fsdp, fsdp.mixed_precision, True, seed)


def _load(
    hf: HfModel,
    wrap: Callable[[PreTrainedModel, Precision], D],
    settings: ModelConfig,
    fsdp: FsdpConfig | FrozenFsdpConfig,
    mixed: MixedPrecisionConfig,
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

    precision = resolve_precision(hf.device, mixed.param_dtype, mixed.reduce_dtype, num_parameters(hf_model))

    # Everything that changes the layers comes before they are sharded.
    hf_model.requires_grad_(trained)
    use_fused_layers(hf_model, settings.use_liger, hf.device)
    lora = Lora.from_config(settings) if trained else None
    if lora is not None:
        add_adapters(hf_model, lora, precision.param_dtype, None if slices is None else slices.stored)
    elif trained and settings.trained_layers is not None:
        _freeze_all_but(hf_model, settings.trained_layers)
    model = wrap(hf_model, precision)
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


def _freeze_all_but(model: PreTrainedModel, layers: int) -> None:
    """Freeze all but the last `layers` decoder layers, and a critic's output layer."""
    freeze_base(model)
    for layer in last_layers(model, layers):
        layer.requires_grad_(True)


def import_modules(external_lib: str | list[str] | None) -> None:
    """Import the modules that register model classes (`external_lib` of a model's settings)."""
    for name in [external_lib] if isinstance(external_lib, str) else external_lib or []:
        importlib.import_module(name)


def _damage_is_named() -> contextlib.AbstractContextManager[None]:
    """Context that raises ConfigError for files that cannot be read: at the start of a run its settings are wrong."""
    return translated(CheckpointError, lambda error: ConfigError(f"cannot load the model: {error}"))


CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. Parameters are counted once each (a tied head is the embedding); `key_width` is key heads x
    head size.

    `num_looked_up` of `num_params` are in no matrix product: an embedding that is not also the head.
    `num_adapted`: parameters of adapters (and of a critic's output layer) that are trained in place of all; 0: no
    adapters. `num_frozen`: parameters that are not trained without adapters, as only the last layers are.
    `num_heads`: attention heads of a layer, of its queries and of its keys. `num_embeddings`: the
    number of token ids that have one. `num_unused`: parameters of the experts that are not chosen for a token.
    `num_layers_below`: layers before the first one with something to train, which no backward pass reaches;
    `num_below`: their parameters in matrix products, of experts those that are chosen for a token.
    """

    num_params: int
    num_layers: int
    hidden: int
    mlp: int
    key_width: int
    window: int | None
    num_looked_up: int = 0
    num_adapted: int = 0
    num_heads: int = 0
    num_key_heads: int = 0
    num_embeddings: int = 0
    num_unused: int = 0
    num_frozen: int = 0
    num_layers_below: int = 0
    num_below: int = 0

    @property
    def query_width(self) -> int:
        """Query heads x head size, which need not be the hidden size."""
        return self.key_width * self.num_heads // self.num_key_heads if self.num_heads else self.hidden

    @property
    def num_trained(self) -> int:
        return self.num_adapted or self.num_params - self.num_frozen


def policy_shape(config: Config) -> ModelShape:
    """Shape of the policy that a run would load. Raises ConfigError."""
    model = config.actor_rollout_ref.model
    import_modules(model.external_lib)
    return trained_shape(CausalLm.of(model.path, model, CPU), model)


def _unused_in_experts(model: nn.Module, config: Any) -> int:
    """Parameters of the experts that are not chosen for a token. A layer's experts are one module, whose parameters
    have an expert a row.
    """
    chosen, unused = getattr(config, "num_experts_per_tok", None), 0
    for module in model.modules() if chosen else ():
        number = getattr(module, "num_experts", None)
        for parameter in module.parameters(recurse=False):
            if parameter.ndim > 1 and len(parameter) == number and type(module).__name__.endswith("Experts"):
                unused += parameter.numel() * (number - chosen) // number
    return unused


def context_window(config: Any) -> int | None:
    """The tokens of the longest sequence that a model was made for, by its text config; None where that does not say.

    With LongRoPE it is the length beyond which its frequencies change. They would be those of a pass's longest row, so
    that a row's log-probs depended on the rows beside it, and an engine chooses them by the longest that it allows.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # some models have them for each type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            original: int = parameters["original_max_position_embeddings"]
            return original
    return getattr(config, "max_position_embeddings", None)


def model_shape(hf: HfModel) -> ModelShape:
    """Shape of a language model, or of a critic made from one; its folder needs only a config.json. Raises
    ConfigError.
    """
    return _shape_of(hf.on_meta())


def trained_shape(hf: HfModel, settings: ModelConfig) -> ModelShape:
    """The shape of a model of which `settings` say what is trained: all, adapters, or the last layers. Raises
    ConfigError.
    """
    model = hf.on_meta()
    shape, lora, number = _shape_of(model), Lora.from_config(settings), settings.trained_layers
    if number is not None:
        below, config = text_layers(model)[: -len(last_layers(model, number))], model.config.get_text_config()
        num_below = sum(num_parameters(layer) - _unused_in_experts(layer, config) for layer in below)
        shape = replace(shape, num_layers_below=len(below), num_below=num_below)

    # What is trained is counted in the model itself: which layers have adapters is decided there.
    if lora is not None:
        add_adapters(model, lora, torch.float32)
    elif number is not None:
        _freeze_all_but(model, number)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if lora is not None:
        return replace(shape, num_adapted=num_trained)
    return replace(shape, num_frozen=shape.num_params - num_trained)


def _shape_of(model: PreTrainedModel) -> ModelShape:
    # What the configs of some architectures lack has the usual value.
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return ModelShape(
        num_params=num_parameters(model),
        num_layers=len(text_layers(model)),
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_width=key_heads * head_size(config),
        window=context_window(config),
        num_looked_up=0 if model.config.tie_word_embeddings else num_parameters(model.get_input_embeddings()),
        num_heads=heads,
        num_key_heads=key_heads,
        num_embeddings=model.get_input_embeddings().weight.shape[0],
        num_unused=_unused_in_experts(model, config),
    )
