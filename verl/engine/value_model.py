"""A decoder with one output per token: the value of the state before that token.

The model is Hugging Face's token classifier with one label, the format of published critics. So transformers loads the
critics saved here, and published critics and causal language models load here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from verl.engine.batching import ModelInput
from verl.engine.hf_model import HfModel
from verl.engine.model import Decoder
from verl.errors import ConfigError


class ValueModel(Decoder):
    """Decoder, then a linear head with one output, in float32 at least whatever format the decoder runs in."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """[N] float: for each selected token the value of all that comes before it, in units of reward."""
        # Model families name the output layer differently (score, classifier).
        head = next(module for module in self.model.children() if isinstance(module, nn.Linear))
        hidden_NH = self._hidden(inputs)
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        value_N = hidden_NH.to(dtype) @ head.weight[0].to(dtype)
        value_N = value_N if head.bias is None else value_N + head.bias.to(dtype)
        return value_N if inputs.share is None else inputs.share.gather(value_N)


class TokenClassifier(HfModel):
    """A token classifier with one label. A head that is not in the files starts at zero, so that every value is 0."""

    auto_class = AutoModelForTokenClassification
    setting = "critic.model.path"
    kind = "value model"
    new_head = True

    def config(self) -> PreTrainedConfig:
        """A new config with one label and without dropout. Raises ConfigError too if the model cannot be a critic."""
        config = super().config()
        _require_token_classifier(config, self.path)
        config.num_labels = 1
        config.classifier_dropout = 0.0  # left out, it means 0.1
        return config

    def _complete(self, model: PreTrainedModel, missing: set[str]) -> None:
        decoder = f"{model.base_model_prefix}."
        if absent := sorted(name for name in missing if name.startswith(decoder)):
            lacks = f"the model at '{self.path}' lacks {len(absent)} weights of its decoder"
            raise ConfigError(f"{lacks}, the first is {absent[0]}")
        with torch.no_grad():
            for name in missing:
                model.get_parameter(name).zero_()

    def _check(self, model: PreTrainedModel) -> None:
        model.config.architectures = [type(model).__name__]


def _require_token_classifier(config: Any, path: str) -> None:
    own = getattr(config, "auto_map", None) or {}  # classes that come with the model's files
    if type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING and "AutoModelForTokenClassification" not in own:
        raise ConfigError(
            f"the model at '{path}' cannot be a critic: transformers has no token classification for model type "
            f"'{config.model_type}'; set critic.model.path to another model, or use an advantage without a critic "
            "(algorithm.adv_estimator=grpo)"
        )
