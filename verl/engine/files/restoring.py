"""Putting saved weights back into a model that is already sharded."""

from __future__ import annotations

from pathlib import Path

from verl.engine.device.sharding import reshard
from verl.engine.files.adapter_files import adapter_tensors, adapter_weights
from verl.engine.files.slices import fill_part
from verl.engine.files.weight_files import weight_files
from verl.engine.model import Decoder, named_tensors
from verl.errors import CheckpointError


def load_saved(model: Decoder, path: Path) -> None:
    """Load the weights that `saving.save_model` wrote to `path` into `model`; each rank reads its own slices.

    For a model with adapters only these are loaded. Raises CheckpointError when a weight is missing, has another
    shape, or its file is damaged; nothing is changed then.
    """
    reshard(model)
    adapters = adapter_tensors(model)
    files = adapter_weights(path) if adapters else weight_files(path)
    if files is None:
        raise CheckpointError(f"{path} has no model.safetensors")
    target = adapters or dict(named_tensors(model))
    if absent := sorted(target.keys() - files.file_of.keys()):
        raise CheckpointError(f"{path} lacks {len(absent)} weights, the first is {absent[0]}")
    for name, tensor in target.items():
        if (found := files.shape(name)) != tensor.shape:
            raise CheckpointError(f"{path}: {name} has shape {list(found)}, not {list(tensor.shape)}")
    for name, tensor in target.items():
        fill_part(tensor, files, name)
