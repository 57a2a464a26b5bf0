"""Hugging Face models that return what is needed per token, never logits: statistics of a causal language model's
output, or a critic's values.

A critic is Hugging Face's token classifier with one label, the format of published critics. So transformers loads the
critics saved here, and published critics and causal language models load here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from verl.engine.batching import Layout, ModelInput
from verl.engine.device.sequence_parallel import SequenceGroup, require_divisible_heads
from verl.engine.head import Head, HeadRequest, TokenStats, token_stats
from verl.engine.hf_model import HfModel, head_size, text_layers, weights_of
from verl.engine.lora import adapters_off
from verl.engine.varlen import NAME, use_varlen_attention, why_not_packed
from verl.errors import ConfigError


class Decoder(nn.Module):
    """A Hugging Face model whose last hidden states are wanted at the selected tokens only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Self:
        """Set training mode for nothing but gradient checkpointing, which works in no other one. A pass that trains
        computes what one that reads does: log-probs of both are compared, and some models draw random numbers in
        training mode (the experts of PhiMoE, the jitter of Mixtral's router).
        """
        super().train(False)
        for module in self.modules():
            module.training = mode and bool(getattr(module, "gradient_checkpointing", False))
        return self

    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        """[N, H] last hidden states at the positions that predict the selected tokens; a forward pass of its own.

        Of a slice they are those of its own tokens [n, H].
        """
        return self._hidden(inputs)

    def _hidden(self, inputs: ModelInput) -> torch.Tensor:
        """What `hidden` returns, for use within `forward`: there, a sharded model would take the end of `hidden` for
        that of the forward pass, and gather the root unit again in the backward.
        """
        rows = {} if inputs.packed is None else inputs.packed.attention_arguments()
        if inputs.share is not None:
            rows["sequence"] = inputs.share.group
        output = self.model.base_model(
            input_ids=inputs.ids_BL, position_ids=inputs.position_ids_BL, attention_mask=None, use_cache=False, **rows
        )
        return output.last_hidden_state.flatten(0, 1).index_select(0, inputs.select_N)


class CausalModel(Decoder):
    """Decoder, then the head in chunks of tokens, selected tokens only.

    `head_chunk_tokens` and `head_dtype` are `chunk_tokens` and `dtype` of `head.HeadRequest`.
    """

    def __init__(
        self, model: PreTrainedModel, head_chunk_tokens: int | None, head_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model)
        self.head_chunk_tokens = head_chunk_tokens
        self.head_dtype = head_dtype

    def forward(self, inputs: ModelInput, temperature: float, **requested: Any) -> TokenStats:
        """Statistics [N] of the selected tokens; logits are divided by `temperature` first.

        `requested`: further fields of `head.HeadRequest`. Of a slice the head sees the slice's tokens, an anchor's
        hidden states are of these, and the statistics are gathered.
        """
        request = HeadRequest(inputs.label_N, temperature, self.head_chunk_tokens, dtype=self.head_dtype, **requested)
        if inputs.share is None:
            return token_stats(self._hidden(inputs), self.head(), request)
        stats = token_stats(self._hidden(inputs), self.head(), request.part(inputs.share.own))
        gathered: list[Any] = [None if value_n is None else inputs.share.gather(value_n) for value_n in stats]
        return TokenStats(*gathered)

    def head(self) -> Head:
        """The output projection as it is right now (whole while the sharded model is gathered)."""
        projection = self.model.get_output_embeddings()
        return Head(projection.weight, getattr(projection, "bias", None))


class ReferencePolicy(nn.Module):
    """Computes like a `CausalModel` with the weights that `policy` started from. Has no parameters of its own."""

    def __init__(self, policy: CausalModel) -> None:
        super().__init__()
        self.policy = policy

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model, with adapters."""
        return self.policy.model

    @torch.no_grad()
    def forward(self, inputs: ModelInput, temperature: float, **requested: Any) -> TokenStats:
        """What `CausalModel.forward` returns, with adapters off."""
        with adapters_off(self.policy):
            stats: TokenStats = self.policy(inputs, temperature, **requested)
        return stats

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        """What `CausalModel.hidden` returns, with adapters off."""
        with adapters_off(self.policy):
            return self.policy.hidden(inputs)

    def head(self) -> Head:
        """The policy's own head: no adapter changes it."""
        return self.policy.head()

    def train(self, mode: bool = True) -> ReferencePolicy:
        """Does nothing: the policy keeps its mode, as it may be in the middle of an update."""
        return self


def named_tensors(model: Decoder) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers under their Hugging Face names, still sharded."""
    return weights_of(model.model)


class CausalLm(HfModel):
    """A causal language model."""

    auto_class = AutoModelForCausalLM
    setting = "model.path"
    kind = "causal language model"

    def _complete(self, model: PreTrainedModel, missing: set[str]) -> None:
        """Nothing to do: transformers has initialized the missing weights, and warned."""

    def _check(self, model: PreTrainedModel) -> None:
        if (why := why_other_logits(model)) is not None:
            raise ConfigError(f"{type(model).__name__} {why}; the engine would compute other logits: use another model")


class _OnlyHidden(BaseModelOutputWithPast):
    """The output of a decoder that has nothing but hidden states: whatever else is read is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@torch.no_grad()
def why_other_logits(model: PreTrainedModel) -> str | None:
    """The reason why the model's logits are not its output layer's product with its decoder's last hidden states, which
    is all that `CausalModel` computes; None if they are.

    The model's own `forward` is tried with made-up hidden states and made-up logits in place of what its decoder and
    its output layer return, so that no weight is needed.
    """
    decoder, head = model.base_model, model.get_output_embeddings()
    if decoder is model or head is None:
        return "does not name its decoder and its output layer"
    if type(head).forward is not nn.Linear.forward:
        return f"has an output layer that is not linear ({type(head).__name__})"

    # Made-up values are far from 0, where a cap does nothing.
    vocabulary, width = head.weight.shape
    dtype = head.weight.dtype
    hidden_BLH = torch.linspace(-100, 100, 2 * width).view(1, 2, width).to(dtype)
    logits_BLV = torch.linspace(-1000, 1000, 2 * vocabulary).view(1, 2, vocabulary).to(dtype)
    into_head: list[torch.Tensor] = []

    def head_forward(input_BLH: torch.Tensor) -> torch.Tensor:
        into_head.append(input_BLH.clone())
        return logits_BLV.clone()

    def decoder_forward(*_: Any, **__: Any) -> _OnlyHidden:
        return _OnlyHidden(last_hidden_state=hidden_BLH.clone())

    ids_BL = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with contextlib.ExitStack() as stack:
            for module in {decoder, decoder.get_decoder()}:  # some models (OPT) pass by the decoder's outer part
                stack.enter_context(_forward_is(module, decoder_forward))
            stack.enter_context(_forward_is(head, head_forward))
            output_BLV = model(input_ids=ids_BL, use_cache=False).logits
    except Exception as error:  # of the model's own code, which needs a weight here, say
        return f"does more than its output layer does after its decoder ({type(error).__name__}: {error})"
    # As float32, into which some models cast their logits.
    if not into_head or not torch.equal(into_head[0].float(), hidden_BLH.float()):
        return "changes its last hidden states before its output layer"
    return None if torch.equal(output_BLV.float(), logits_BLV.float()) else "changes its logits after its output layer"


@contextlib.contextmanager
def _forward_is(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def layout_of(
    models: Sequence[PreTrainedModel],
    remove_padding: bool,
    sequence: SequenceGroup | None = None,
    share_prefixes: bool = False,
) -> Layout:
    """How micro-batches of `models` (the first is trained) lie: packed if `remove_padding` and they all can be.

    `share_prefixes` has no effect where rows are padded or shared by ranks.

    Lets the models attend within packed rows; a model that cannot is named in a warning, and rows are padded. Where
    ranks share rows (`sequence`) that is a ConfigError, and so are heads that the ranks cannot share equally.
    """
    if sequence is None:
        packed = remove_padding and use_varlen_attention(models, keep_flash=not share_prefixes)
        return Layout(packed, attention_cost(models[0]), share_prefixes=packed and share_prefixes)
    for model in models:
        require_divisible_heads(model.config.get_text_config(), sequence.size)
        if (why := why_not_packed(model)) is not None:
            raise ConfigError(f"ulysses_sequence_parallel_size is {sequence.size}, but {type(model).__name__} {why}")
        model.set_attn_implementation(NAME)  # flash-attention 2 would not exchange heads
    return Layout(True, attention_cost(models[0]), sequence)


def attention_cost(model: PreTrainedModel) -> float:
    """c, when the operations of a row of L tokens are proportional to L + c L^2; 0 where the config does not say.

    A layer with P weights and an attention of width W does 2 P L in its products and 2 W L^2 in causal attention.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    weights = sum(parameter.numel() for layer in text_layers(model) for parameter in layer.parameters())
    if not heads or not weights:
        return 0.0
    return float(heads * head_size(config) * config.num_hidden_layers / weights)


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
