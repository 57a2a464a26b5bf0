"""Putting saved weights back into a model that is already sharded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.engine.model import Decoder
from verl.engine.sharding import named_tensors, reshard
from verl.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_saved(model: Decoder, path: Path) -> None:
    """Copy the weights of a folder that `saving.save_model` wrote into `model`, each rank its own shard.

    Raises CheckpointError when a weight is missing, has another shape, or cannot be read; nothing is changed then.
    """
    reshard(model)
    target = dict(named_tensors(model))
    saved = {name: _read(path, file, name) for name, file in _files(path, target).items()}
    for name, tensor in target.items():
        if saved[name].shape != tensor.shape:
            raise CheckpointError(f"{path}: {name} has shape {list(saved[name].shape)}, not {list(tensor.shape)}")
    for name, tensor in target.items():
        value = saved[name].to(tensor.device, tensor.dtype)
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(value)


def _files(path: Path, names: dict[str, torch.Tensor]) -> dict[str, str]:
    """Which file of the folder holds each weight."""
    index = path / INDEX
    if not index.is_file():
        return dict.fromkeys(names, "model.safetensors")
    held = json.loads(index.read_text())["weight_map"]
    if absent := sorted(names.keys() - held.keys()):
        raise CheckpointError(f"{path} lacks {len(absent)} weights, the first is {absent[0]}")
    return {name: held[name] for name in names}


def _read(path: Path, file: str, name: str) -> torch.Tensor:
    try:
        with safe_open(path / file, framework="pt", device="cpu") as source:
            return source.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / file}: weight {name} cannot be read: {error}") from error
