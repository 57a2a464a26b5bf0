"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen weight W [out, in] acts as W + (alpha / r) B A.

A [r, in] is initialized uniformly in +-1 / sqrt(in), as in peft, and B [out, r] to zero, so that the model starts
bitwise equal to its base. Only adapters are trained, and a critic's output layer.

This layer is not peft's because peft wraps each linear layer in another module, which renames every weight of the base,
and weights are read, sent and saved by name. Here W keeps its name, and FSDP2 shards W and B by the same rows, so that
merging them communicates only A. Files on disk have peft's format (`adapter_files`).
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.config.sections.model import LoraTargets, ModelConfig
from verl.engine.device.runtime import linear
from verl.engine.device.sharding import own_index
from verl.engine.hf_model import freeze_base, last_layers
from verl.errors import ConfigError

ALL_LINEAR = "all-linear"
PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Lora:
    """Rank r, alpha, and the target layers: the ends of their names, or `all-linear`, and in how many of the last
    decoder layers; None: in all.
    """

    rank: int
    alpha: float
    targets: LoraTargets
    last_layers: int | None = None

    @classmethod
    def from_config(cls, model: ModelConfig) -> Lora | None:
        """The settings of `model`; None if all weights are trained."""
        if not model.lora_rank:
            return None
        return cls(model.lora_rank, model.lora_alpha, model.target_modules, model.trained_layers)

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer with the frozen parameters of `layer` and an adapter in float32."""

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.lora = layer.in_features, layer.out_features, lora
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A, self.lora_B = (
            nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=layer.weight.device))
            for shape in ((lora.rank, self.in_features), (self.out_features, lora.rank))
        )
        self.adapter_is_on = True
        self.stored_name = ""  # the weight's name in the model's files

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out]: the layer's output, with the adapter's unless it is off."""
        output = linear(input, self.weight, self.bias)
        if not self.adapter_is_on:
            return output
        low = self.lora.scale * linear(input, self.lora_A)  # scaled where it is narrow
        return output + linear(low, self.lora_B)


def add_adapters(
    model: PreTrainedModel, lora: Lora, dtype: torch.dtype, stored: Mapping[str, str | None] | None = None
) -> None:
    """Freeze the model and add adapters to its target layers; `begin_adapters` initializes them.

    The frozen weights are kept in `dtype`, to which the forward pass casts them anyway. A critic's output layer stays
    as it is, and is trained. stored: the weights' names in the model's files, where they differ. Raises ConfigError for
    unknown targets.
    """
    names = target_layers(model, lora.targets, lora.last_layers)
    for parameter in freeze_base(model):
        parameter.data = parameter.data.to(dtype)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        adapted = LoraLinear(layer, lora)
        weight = f"{name}.weight"
        adapted.stored_name = (stored or {}).get(weight) or weight
        model.set_submodule(name, adapted)


def target_layers(model: PreTrainedModel, targets: LoraTargets, last: int | None = None) -> list[str]:
    """Names of the linear layers that match `targets` in the `last` decoder layers (None: in the whole decoder).
    Raises ConfigError with the possible names.
    """
    decoder = model.base_model_prefix
    inside = {module for layer in last_layers(model, last) for module in layer.modules()}
    linear = [
        f"{decoder}.{name}"
        for name, module in model.base_model.named_modules()
        if type(module) is nn.Linear and (last is None or module in inside)
    ]
    if targets == ALL_LINEAR and linear:
        return linear
    # A target is the end of a layer's name, in whole parts: `q_proj`, or `3.self_attn.q_proj` for one layer.
    wanted = [targets] if isinstance(targets, str) else targets
    unknown = [target for target in wanted if not any(f".{name}".endswith(f".{target}") for name in linear)]
    if unknown or not wanted:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ConfigError(
            f"target_modules={targets}: the decoder of {type(model).__name__} has no linear layer "
            f"{', '.join(unknown) or 'of that name'}. It has {ends}: name some of them, or set "
            f"target_modules={ALL_LINEAR}"
        )
    return [name for name in linear if any(f".{name}".endswith(f".{target}") for target in wanted)]


@torch.no_grad()
def begin_adapters(model: nn.Module, seed: int) -> None:
    """Initialize A and B. A depends on the seed and its own name, not on the sharding."""
    for name, layer in adapted_layers(model):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        bound = 1 / math.sqrt(layer.in_features)
        values = torch.empty(layer.lora_A.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)
        _local(layer.lora_A).copy_(values[own_index(layer.lora_A)])
        _local(layer.lora_B).zero_()


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Layers with adapters, and their names; none in a model without adapters."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is A or B."""
    return name.rpartition(".")[2] in PARTS


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what its base would."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.adapter_is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_is_on = True


def merge(weight: torch.Tensor, scaled_B: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """W + ((alpha / r) B) A in float32, for all rows of W and B or the same part of them. `scaled_B` is (alpha / r) B.

    W must be the base's own weight: merging into merged weights would accumulate rounding errors.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a trainer in bfloat16 lets float32 products use TF32
    try:
        return torch.addmm(weight.float(), scaled_B.float(), A.float())
    finally:
        torch.set_float32_matmul_precision(before)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
