"""Saving in Hugging Face format through one rank: written under a temporary name, flushed to disk, then renamed."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from verl.engine.device.sharding import is_main_rank, reshard
from verl.engine.files.adapter_files import adapter_tensors, adapter_weights, write_adapter
from verl.engine.files.slices import Entry, fill_part, stream, write_safetensors
from verl.engine.files.weight_files import weight_files
from verl.engine.merging import exported
from verl.engine.model import Decoder, named_tensors
from verl.engine.transformers_private import has_own_code
from verl.errors import CheckpointError, ConfigError
from verl.process.storage import could_not_write, sync

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 2**30


def save_model(model: Decoder, path: Path, tokenizer: Any, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Save config, float32 weights and tokenizer to the folder `path`, replacing what is there. All ranks call it.

    Adapters are merged into the weights, and also saved separately in the folder `adapter` (`adapter_files`).

    Rank 0 writes, holding one shard of one weight at a time; the others send theirs and hold nothing. A failure (a full
    disk, say) removes what was written, leaves an older `path` as it was, and raises CheckpointError on every rank.
    """
    # All ranks iterate `parts` to the end; only on the main rank it yields values.
    reshard(model)
    weights = dict(sorted(exported(model).items(), key=lambda item: -item[1].dtype.itemsize))  # so files are aligned
    adapters = adapter_tensors(model)
    parts = stream(chain((weight.make() for weight in weights.values()), adapters.values()))
    failure: Exception | None = None
    if is_main_rank():
        entries = [Entry(name, weight.dtype, weight.shape) for name, weight in weights.items()]
        try:
            _write(model, path, tokenizer, parts, plan_files(entries, max_file_bytes))
        except Exception as error:  # noqa: BLE001  the other ranks have more to send: take that, then raise
            failure = error
    for _ in parts:
        pass

    # No rank goes on as if there were a checkpoint.
    failed = torch.tensor(float(failure is not None))
    if dist.is_initialized():
        dist.all_reduce(failed)
    if failed.item():
        why = f"{path} could not be written by rank 0" if failure is None else could_not_write(path, failure)
        raise CheckpointError(why) from failure


def _write(
    model: Decoder, path: Path, tokenizer: Any, parts: Iterator[torch.Tensor], files: Mapping[str, Sequence[Entry]]
) -> None:
    temporary = path.with_name(f".{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write_weights(temporary, parts, files)
        write_adapter(temporary, model, parts)
        save_without_weights(model.model, tokenizer, temporary)
        # All data is on disk before the folder gets its name: whatever has that name is complete.
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        _replace(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_without_weights(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save what a model's folder has besides weights: config, generation config, the code that came with it, tokenizer.

    The two configs are written as they were loaded: transformers refuses to save some of those that it loads (a
    temperature without do_sample, sampling parameters in config.json), which published models have.
    """
    for custom in (model, model.config):
        if has_own_code(custom):
            custom_object_save(custom, folder, config=model.config)
    model.config.to_json_file(folder / "config.json", use_diff=True)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def save_as_a_test(model: PreTrainedModel, tokenizer: Any, named: str) -> None:
    """Save all but the weights to a temporary folder. Raises ConfigError for what would fail at the first checkpoint;
    `named` says where the model is from.
    """
    with tempfile.TemporaryDirectory(prefix="trial-save-") as folder:
        try:
            save_without_weights(model, tokenizer, Path(folder))
        except Exception as error:  # whatever code of others raises, it would raise it again
            what = f"{named} could not be saved again as a checkpoint"
            raise ConfigError(f"{what}: {type(error).__name__}: {error}") from error


def plan_files(entries: Sequence[Entry], max_file_bytes: int) -> dict[str, list[Entry]]:
    """The entries of each file, in order; no file is larger than the limit unless one weight is."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_weights(folder: Path, parts: Iterator[torch.Tensor], files: Mapping[str, Sequence[Entry]]) -> None:
    """Write `parts`, the values of all entries in the order of `files`; several files get an index."""
    for file, entries in files.items():
        write_safetensors(folder / file, entries, parts)
    if len(files) > 1:
        weight_map = {entry.name: file for file, entries in files.items() for entry in entries}
        total = sum(entry.num_bytes for entries in files.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
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


# Saved weights go back into a model that is already sharded.


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
    # All weights are checked before the first one is read, so that an error leaves the model as it was.
    if absent := sorted(target.keys() - files.file_of.keys()):
        raise CheckpointError(f"{path} lacks {len(absent)} weights, the first is {absent[0]}")
    for name, tensor in target.items():
        if (found := files.shape(name)) != tensor.shape:
            raise CheckpointError(f"{path}: {name} has shape {list(found)}, not {list(tensor.shape)}")
    for name, tensor in target.items():
        fill_part(tensor, files, name)
