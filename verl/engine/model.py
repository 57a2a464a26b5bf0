"""A Hugging Face causal language model that answers with per-token statistics instead of logits."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils.logging import disable_progress_bar

from verl.engine.batching import Layout, ModelInput
from verl.engine.head import Head, Question, TokenStats, token_stats
from verl.engine.varlen import use_varlen_attention
from verl.errors import ConfigError
from verl.pretrained import load_model_config

logger = logging.getLogger(__name__)

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Decoder(nn.Module):
    """A Hugging Face model whose last hidden states are wanted at the selected tokens only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        """[N, H] last hidden states at the positions that predict the selected tokens."""
        rows = {} if inputs.packed is None else inputs.packed.attention_arguments()
        output = self.model.base_model(
            input_ids=inputs.ids_BL, position_ids=inputs.position_ids_BL, attention_mask=None, use_cache=False, **rows
        )
        return output.last_hidden_state.flatten(0, 1).index_select(0, inputs.select_N)


class CausalModel(Decoder):
    """Decoder, then the head in chunks of tokens, selected tokens only.

    `head_chunk_tokens` and `head_dtype` are `chunk_tokens` and `dtype` of `head.Question`.
    """

    def __init__(
        self, model: PreTrainedModel, head_chunk_tokens: int | None, head_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model)
        self.head_chunk_tokens = head_chunk_tokens
        self.head_dtype = head_dtype

    def forward(self, inputs: ModelInput, temperature: float, **asked: Any) -> TokenStats:
        """Statistics [N] of the selected tokens; logits are divided by `temperature` first.

        `asked` are further fields of `head.Question`.
        """
        question = Question(inputs.label_N, temperature, self.head_chunk_tokens, dtype=self.head_dtype, **asked)
        return token_stats(self.hidden(inputs), self.head(), question)

    def head(self) -> Head:
        """The output projection as it is right now (whole while the sharded model is gathered)."""
        projection = self.model.get_output_embeddings()
        return Head(projection.weight, getattr(projection, "bias", None))


def load_causal_lm(
    path: str,
    device: torch.device,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Load a model folder (or hub name) whole, with float32 weights in CPU memory, without dropout.

    Attention is flash-attention 2 on CUDA where that package is installed, else PyTorch's own.
    Raises ConfigError when there is no usable model at `path`.
    """
    source = source_of(path, "model.path")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=_config_of(source, trust_remote_code, override_config),
            dtype=torch.float32,
            attn_implementation=attention_for(device),
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from '{path}': {error}") from error
    return _ready(model, gradient_checkpointing)


def blank_causal_lm(
    path: str,
    device: torch.device,
    override_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """What `load_causal_lm` gives, but with parameters on `meta`: no memory is taken and no weight is read."""
    source = source_of(path, "model.path")
    try:
        config = _config_of(source, trust_remote_code, override_config)
        model = blank(AutoModelForCausalLM, source, config, device, trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from '{path}': {error}") from error
    return _ready(model, gradient_checkpointing)


def blank(
    auto_class: Any, source: str, config: PreTrainedConfig, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """A float32 model of `config` with parameters on `meta` and buffers on the CPU, as `from_pretrained` makes them."""
    with torch.device("meta"), meta_device_safe_creation_ops():
        model: PreTrainedModel = auto_class.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_for(device),
            trust_remote_code=trust_remote_code,
        )
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # which leaves only buffers to initialize
    model.initialize_weights()
    if model.can_generate():
        with contextlib.suppress(OSError):  # there need not be a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model.eval()


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, each once, and saved buffers, as they are."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _config_of(source: str, trust_remote_code: bool, override_config: Mapping[str, Any] | None) -> PreTrainedConfig:
    config = load_model_config(source, trust_remote_code, override_config)
    switch_off_dropout(config)
    return config


def _ready(model: PreTrainedModel, gradient_checkpointing: bool) -> PreTrainedModel:
    _refuse_logit_transforms(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def source_of(path: str, setting: str) -> str:
    """What to load a model from. Raises ConfigError, naming `setting`, for a folder without a model in it."""
    if path.startswith((".", "/", "~")) and not (Path(path).expanduser() / "config.json").is_file():
        raise ConfigError(f"no model at '{path}': there is no config.json; set {setting} to a Hugging Face folder")
    if not sys.stderr.isatty():
        disable_progress_bar()
    return str(Path(path).expanduser()) if path.startswith("~") else path


def switch_off_dropout(config: Any) -> None:
    """Old and new log-probs (or values) of one token are compared, so the forward must not be random."""
    for name, value in config.to_dict().items():
        if value and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def attention_for(device: torch.device) -> str:
    """Name of the attention that Hugging Face should use on `device`."""
    flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    return "flash_attention_2" if flash else "sdpa"


def layout_of(models: Sequence[PreTrainedModel], remove_padding: bool) -> Layout:
    """How micro-batches of `models` (the first is trained) lie: packed if `remove_padding` and they all can be.

    Lets the models attend within packed rows; a model that cannot is named in a warning, and rows are padded.
    """
    return Layout(remove_padding and use_varlen_attention(models), attention_cost(models[0]))


def attention_cost(model: PreTrainedModel) -> float:
    """c, when the operations of a row of L tokens are proportional to L + c L^2; 0 where the config does not say.

    A layer with P weights and an attention of width W does 2 P L in its products and 2 W L^2 in causal attention.
    """
    config = model.config
    heads = getattr(config, "num_attention_heads", None)
    weights = sum(parameter.numel() for layer in decoder_layers(model) for parameter in layer.parameters())
    if not heads or not weights:
        return 0.0
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return float(heads * head_size * config.num_hidden_layers / weights)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model's own class declares them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _refuse_logit_transforms(model: PreTrainedModel) -> None:
    for name in LOGIT_TRANSFORMS:
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"{type(model).__name__} changes its logits ({name}); the chunked head does not do that")
