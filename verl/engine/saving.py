"""Saving in Hugging Face format: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers.dynamic_module_utils import custom_object_save

from verl.engine.model import Decoder
from verl.engine.sharding import is_main_rank, iter_full_parameters, parameter_shapes
from verl.errors import CheckpointError
from verl.storage import could_not_write, sync

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 2**30
BYTES_PER_VALUE = 4  # float32


def save_model(model: Decoder, path: Path, tokenizer: Any, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Save config, float32 weights and tokenizer to the folder `path`, replacing what is there. All ranks call it.

    Rank 0 writes; it holds one file's worth of weights at a time. A failure (a full disk, say) removes what was
    written, leaves an older `path` as it was, and raises CheckpointError on every rank.
    """
    parameters = iter_full_parameters(model)
    failure: Exception | None = None
    if is_main_rank():
        try:
            _write(model, path, tokenizer, parameters, max_file_bytes)
        except Exception as error:  # noqa: BLE001  the other ranks wait in collectives: finish those, then raise
            failure = error
    for _ in parameters:
        pass
    failed = torch.tensor(float(failure is not None))
    if dist.is_initialized():
        dist.all_reduce(failed)
    if failed.item():
        why = f"{path} could not be written by rank 0" if failure is None else could_not_write(path, failure)
        raise CheckpointError(why) from failure


def _write(
    model: Decoder, path: Path, tokenizer: Any, parameters: Iterator[tuple[str, torch.Tensor]], max_file_bytes: int
) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write_weights(temporary, parameters, _plan_files(parameter_shapes(model), max_file_bytes))
        if model.model._auto_class is not None:  # its code came with the files it was loaded from
            custom_object_save(model.model, temporary, config=model.model.config)
        model.model.config.save_pretrained(temporary)
        if model.model.can_generate() and model.model.generation_config is not None:
            model.model.generation_config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        _replace(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _plan_files(shapes: Mapping[str, torch.Size], max_file_bytes: int) -> dict[str, list[str]]:
    """File name to parameter names, in order, no file larger than the limit unless one parameter is."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = shape.numel() * BYTES_PER_VALUE
        if groups[-1] and size + num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, 1)}


def _write_weights(folder: Path, parameters: Iterable[tuple[str, torch.Tensor]], files: dict[str, list[str]]) -> None:
    source = iter(parameters)
    num_bytes = 0
    for file, names in files.items():
        tensors = dict(next(source) for _ in names)
        num_bytes += sum(tensor.numel() for tensor in tensors.values()) * BYTES_PER_VALUE
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _replace(temporary: Path, path: Path) -> None:
    if not path.exists():
        temporary.rename(path)
        return
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old)
