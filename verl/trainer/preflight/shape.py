"""The sizes of a model, from its config.json alone: no weight is read and none is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl.engine.model import decoder_layers, source_of
from verl.engine.sharding import num_parameters
from verl.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Parameters are counted once each (a tied head is the embedding); widths are numbers of values per token.

    `layer_params` are those of one decoder layer, `query_width` and `key_width` are heads x head size.
    """

    num_params: int
    layer_params: int
    num_layers: int
    hidden: int
    mlp: int
    query_width: int
    key_width: int
    vocabulary: int
    window: int | None

    @property
    def root_params(self) -> int:
        """Embedding, last norm and head: the unit of sharding that stays gathered."""
        return self.num_params - self.num_layers * self.layer_params

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.hidden


def model_shape(
    path: str, override_config: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """Of the model folder (config.json suffices) or hub name. Raises ConfigError."""
    try:
        source = source_of(path, "actor_rollout_ref.model.path")
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **dict(override_config or {}))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: the model's config cannot be used: {error}") from error
    layers = decoder_layers(model)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(
        num_params=num_parameters(model),
        layer_params=max((num_parameters(layer) for layer in layers), default=0),
        num_layers=len(layers),
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        query_width=heads * head_size,
        key_width=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        vocabulary=config.vocab_size,
        window=getattr(config, "max_position_embeddings", None),
    )
