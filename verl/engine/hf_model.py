"""Hugging Face models as the engine needs them: float32, without dropout, loaded whole or without their weights."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils.logging import disable_progress_bar

from verl.config.sections.model import ModelConfig
from verl.engine.transformers_private import layer_class_names, mark_parameters_initialized
from verl.errors import ConfigError, VerlError
from verl.pretrained import load_model_config


@dataclass(frozen=True)
class HfModel(ABC):
    """A model folder (or hub name) and how to build the model from it; a subclass says which kind of model.

    Attention is flash-attention 2 where `device` is CUDA and that package is installed, else PyTorch's own, or that of
    the model where it has no other. `whole` and `blank` raise ConfigError when there is no usable model at `path`.
    """

    path: str
    device: torch.device
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    gradient_checkpointing: bool = False

    auto_class: ClassVar[Any]  # transformers' class
    setting: ClassVar[str]  # the config key of the path
    kind: ClassVar[str]  # for messages
    new_head: ClassVar[bool] = False  # whether an output layer that the files lack may start at zero

    @classmethod
    def of(cls, path: str, settings: ModelConfig, device: torch.device, trained: bool = False) -> Self:
        """The model at `path` with `settings`; gradient checkpointing is off unless it is `trained`."""
        checkpointing = trained and settings.enable_gradient_checkpointing
        return cls(path, device, settings.override_config, settings.trust_remote_code, checkpointing)

    @property
    def source(self) -> str:
        """The folder or hub name for transformers. Raises ConfigError for a folder without a model."""
        folder = Path(self.path).expanduser()
        if self.path.startswith((".", "/", "~")) and not (folder / "config.json").is_file():
            raise ConfigError(
                f"no model at '{self.path}': there is no config.json; set {self.setting} to a Hugging Face folder"
            )
        if not sys.stderr.isatty():
            disable_progress_bar()
        return str(folder) if self.path.startswith("~") else self.path

    def config(self) -> PreTrainedConfig:
        """A new config of the model, without dropout. Raises ConfigError."""
        with self._named():
            config = load_model_config(self.source, self.trust_remote_code, self.override_config)
        switch_off_dropout(config)
        return config

    def on_meta(self) -> PreTrainedModel:
        """The model without any memory, for its shapes. Raises ConfigError."""
        with self._named(), torch.device("meta"):
            model: PreTrainedModel = self.auto_class.from_config(
                self.config(), trust_remote_code=self.trust_remote_code
            )
        self._check(model)
        return model

    def whole(self) -> PreTrainedModel:
        """The model with all its weights in CPU memory."""
        with self._named():
            model, report = self.auto_class.from_pretrained(self.source, output_loading_info=True, **self._arguments())
        self._complete(model, set(report["missing_keys"]))
        return self._ready(model)

    def blank(self) -> PreTrainedModel:
        """The model with parameters on `meta` and buffers on the CPU: it takes no memory, and no weights are read."""
        with self._named():
            arguments = self._arguments()
            with torch.device("meta"), meta_device_safe_creation_ops():
                model: PreTrainedModel = self.auto_class.from_config(**arguments)
        _initialize_buffers(model)
        if model.can_generate():
            with self._named():
                self._load_generation_config(model)
        return self._ready(model.eval())

    def _load_generation_config(self, model: PreTrainedModel) -> None:
        """Load it as `from_pretrained` of the model does: without a file of its own, it is part of config.json."""
        for options in ({}, {"config_file_name": "config.json", "_from_model_config": True}):
            with contextlib.suppress(OSError):
                model.generation_config = GenerationConfig.from_pretrained(self.source, **options)
                return

    @abstractmethod
    def _complete(self, model: PreTrainedModel, missing: set[str]) -> None:
        """Handle the weights that the files lack."""

    @abstractmethod
    def _check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError for a model that the engine would compute wrongly."""

    def _arguments(self) -> dict[str, Any]:
        # Without flash attention Hugging Face chooses: PyTorch's own, or the model's where it has no other (attention
        # sinks, say).
        flash = self.device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
        return {
            "config": self.config(),
            "dtype": torch.float32,
            "attn_implementation": "flash_attention_2" if flash else None,
            "trust_remote_code": self.trust_remote_code,
        }

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Context that raises ConfigError for whatever transformers raises for files that it does not like."""
        try:
            yield
        except VerlError:
            raise
        except Exception as error:
            what = f"cannot load a {self.kind} from '{self.path}'"
            raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error

    def _ready(self, model: PreTrainedModel) -> PreTrainedModel:
        self._check(model)
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


def _initialize_buffers(model: PreTrainedModel) -> None:
    """Move the buffers from `meta` to the CPU, with the values that `from_pretrained` gives them."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cpu"))
    mark_parameters_initialized(model)
    model.initialize_weights()


def switch_off_dropout(config: Any) -> None:
    """Set every dropout of the model to 0: old and new log-probs (or values) of a token are compared, so the forward
    pass must not be random. The config of a model of several parts has a config of each.
    """
    for name, value in config.to_dict().items():
        if isinstance(part := vars(config).get(name), PreTrainedConfig):
            switch_off_dropout(part)
        elif value and ("dropout" in name or name.endswith(("pdrop", "layerdrop"))):
            setattr(config, name, 0.0)


def head_size(config: Any) -> int:
    """Values of an attention head, by a model's text config; where its layers differ, as in Gemma 4, the most."""
    values = config.to_dict()  # as an attribute, what layers differ in is refused
    own = (layer.get("head_dim") for layer in (values.get("per_layer_config") or {}).values())
    sizes = [size for size in (values.get("head_dim"), *own) if size]
    return max(sizes) if sizes else config.hidden_size // config.num_attention_heads


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, each once, and saved buffers, as they are."""
    yield from model.named_parameters()
    persistent = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model's own class declares them."""
    names = layer_class_names(model)
    return [module for module in model.modules() if type(module).__name__ in names]


def text_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Those of the `decoder_layers` that text passes: a model that also sees has others."""
    inside = set(model.get_decoder().modules())
    return [layer for layer in decoder_layers(model) if layer in inside]


def last_layers(model: PreTrainedModel, number: int | None) -> list[nn.Module]:
    """The last `number` repeated blocks; None: all of them. Raises ConfigError if there are not so many."""
    layers = text_layers(model)
    if number is not None and number > len(layers):
        raise ConfigError(f"trained_layers={number}, but {type(model).__name__} has {len(layers)} layers: set fewer")
    return layers if number is None else layers[-number:]


def freeze_base(model: PreTrainedModel) -> list[nn.Parameter]:
    """Freeze all but a critic's output layer; returns what is frozen."""
    parts = (model.base_model, model.get_output_embeddings())
    frozen = [parameter for part in parts if part is not None for parameter in part.parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen
