"""A decoder with one output per token: the value of the state that a token was chosen in.

The model is Hugging Face's token classification with one label, the format of published critics, so a saved critic
loads there, and a causal language model or a critic saved there loads here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl.engine.batching import ModelInput
from verl.engine.model import Decoder, attention_for, blank, source_of, switch_off_dropout
from verl.errors import ConfigError
from verl.pretrained import load_model_config


class ValueModel(Decoder):
    """Decoder, then a linear head with one output, in float32 whatever format the decoder runs in."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """[N] float32: for each selected token the value of all that comes before it, in units of reward."""
        head = _head(self.model)
        value_N = self.hidden(inputs).float() @ head.weight[0].float()
        return value_N if head.bias is None else value_N + head.bias.float()


def load_token_classifier(
    path: str,
    device: torch.device,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Load a folder (or hub name) as a one-label token classifier with float32 weights in CPU memory, no dropout.

    A head that is not in the files starts at zero, so that every value is 0 and all ranks agree. Attention is that of
    `load_causal_lm`. Raises ConfigError when there is no usable model at `path`.
    """
    try:
        model, report = AutoModelForTokenClassification.from_pretrained(
            source_of(path, "critic.model.path"),
            config=token_classifier_config(path, override_config, trust_remote_code),
            dtype=torch.float32,
            attn_implementation=attention_for(device),
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load a value model from '{path}': {error}") from error
    _zero_absent_head(model, set(report["missing_keys"]), path)
    return _ready(model, gradient_checkpointing)


def blank_token_classifier(
    path: str,
    device: torch.device,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """What `load_token_classifier` gives, but with parameters on `meta`: no memory is taken and no weight is read."""
    try:
        source = source_of(path, "critic.model.path")
        config = token_classifier_config(path, override_config, trust_remote_code)
        model = blank(AutoModelForTokenClassification, source, config, device, trust_remote_code)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot load a value model from '{path}': {error}") from error
    return _ready(model, gradient_checkpointing)


def _ready(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    model.config.architectures = [type(model).__name__]
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def token_classifier_config(
    path: str, override_config: Mapping[str, Any] | None = None, trust_remote_code: bool = False
) -> Any:
    """The Hugging Face config of the model at `path` with one label and without dropout.

    Raises ConfigError when it cannot be a critic, OSError or ValueError when there is no usable config.json.
    """
    config = load_model_config(source_of(path, "critic.model.path"), trust_remote_code, override_config)
    _require_token_classifier(config, path)
    config.num_labels = 1
    switch_off_dropout(config)
    config.classifier_dropout = 0.0  # left out, it means 0.1
    return config


def _head(model: PreTrainedModel) -> nn.Linear:
    """The output layer, which model families name differently (score, classifier)."""
    return next(module for module in model.children() if isinstance(module, nn.Linear))


def _require_token_classifier(config: Any, path: str) -> None:
    own = getattr(config, "auto_map", None) or {}  # classes that come with the model's files
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING and "AutoModelForTokenClassification" not in own:
        raise ConfigError(
            f"the model at '{path}' cannot be a critic: transformers has no token classification for model type "
            f"'{config.model_type}'; set critic.model.path to another model, or use an advantage without a critic "
            "(algorithm.adv_estimator=grpo)"
        )


def _zero_absent_head(model: PreTrainedModel, missing: set[str], path: str) -> None:
    decoder = f"{model.base_model_prefix}."
    if absent := sorted(name for name in missing if name.startswith(decoder)):
        raise ConfigError(f"the model at '{path}' lacks {len(absent)} weights of its decoder, the first is {absent[0]}")
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
