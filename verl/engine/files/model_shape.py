"""The sizes of a model, from its config.json alone: no weights are read or created."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from verl.config import Config
from verl.engine.device.sharding import num_parameters
from verl.engine.files.loading import import_modules
from verl.engine.hf_model import HfModel, decoder_layers
from verl.engine.lora import Lora, add_adapters
from verl.engine.model import CausalLm

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model. Parameters are counted once each (a tied head is the embedding); `key_width` is key heads x
    head size.

    `num_looked_up` of `num_params` are in no matrix product: an embedding that is not also the head.
    `num_adapted`: parameters of adapters (and of a critic's output layer) that are trained in place of all; 0: all are.
    `num_heads`: attention heads of a layer, of its queries and of its keys. `num_embeddings`: the
    number of token ids that have one.
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

    @property
    def num_trained(self) -> int:
        return self.num_adapted or self.num_params


def policy_shape(config: Config) -> ModelShape:
    """Shape of the policy that a run would load. Raises ConfigError."""
    model = config.actor_rollout_ref.model
    import_modules(model.external_lib)
    return model_shape(CausalLm.of(model.path, model, CPU), Lora.from_config(model))


def model_shape(hf: HfModel, lora: Lora | None = None) -> ModelShape:
    """Shape of a language model, or of a critic made from one, with adapters if `lora` is given; a folder needs only a
    config.json. Raises ConfigError.
    """
    # What the configs of some architectures lack has the usual value.
    model = hf.on_meta()
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = ModelShape(
        num_params=num_parameters(model),
        num_layers=len(decoder_layers(model)),
        hidden=config.hidden_size,
        mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_width=key_heads * head_size,
        window=getattr(config, "max_position_embeddings", None),
        num_looked_up=0 if config.tie_word_embeddings else num_parameters(model.get_input_embeddings()),
        num_heads=heads,
        num_key_heads=key_heads,
        num_embeddings=model.get_input_embeddings().weight.shape[0],
    )

    # The adapters' parameters are counted in the model itself: which layers have some is decided there.
    if lora is None:
        return shape
    add_adapters(model, lora, torch.float32)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return replace(shape, num_adapted=num_trained)
