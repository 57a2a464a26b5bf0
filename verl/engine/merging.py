"""Weights for export: under their Hugging Face names, with adapters merged into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from verl.engine.device.sharding import local, on_mesh, sharded_like
from verl.engine.hf_model import weights_of
from verl.engine.lora import LoraLinear, adapted_layers, is_adapter, merge
from verl.engine.model import Decoder, ReferencePolicy


@dataclass(frozen=True)
class Exported:
    """A weight to export. `make` returns it, sharded; a collective if it has an adapter to merge."""

    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[], torch.Tensor]


def exported(model: Decoder | ReferencePolicy) -> dict[str, Exported]:
    """Parameters and saved buffers by name. Those of a model with adapters are float32."""
    layers = {f"{name}.weight": layer for name, layer in adapted_layers(model.model)}
    adapted = {} if isinstance(model, ReferencePolicy) else layers
    found = {}
    for name, tensor in weights_of(model.model):
        if not is_adapter(name):
            make = (
                partial(merged_weight, adapted[name]) if name in adapted else partial(_as_it_is, tensor, bool(layers))
            )
            dtype = torch.float32 if layers and tensor.is_floating_point() else tensor.dtype
            found[name] = Exported(dtype, tensor.shape, make)
    return found


def merged_tensors(model: Decoder | ReferencePolicy) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and sharded tensors, each made when it is reached. Every rank must exhaust the iterator."""
    for name, weight in exported(model).items():
        yield name, weight.make()


@torch.no_grad()
def merged_weight(layer: LoraLinear) -> torch.Tensor:
    """[out, in] float32, sharded like the weight. A collective: A is gathered."""
    weight, A, B = (on_mesh(tensor) for tensor in (layer.weight, layer.lora_A, layer.lora_B))
    whole_A = A.full_tensor() if isinstance(A, DTensor) else A
    rows = merge(local(weight), layer.lora.scale * local(B), whole_A)
    return sharded_like(weight, rows) if isinstance(weight, DTensor) else rows


@torch.no_grad()
def _as_it_is(tensor: torch.Tensor, in_float32: bool) -> torch.Tensor:
    return tensor.float() if in_float32 and tensor.is_floating_point() else tensor
