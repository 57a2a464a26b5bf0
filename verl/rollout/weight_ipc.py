"""Weights from trainer to sampler on one GPU: the sampler's process maps the trainer's memory (CUDA IPC).

The weights go in buckets (`weight_buckets`): every trainer rank exports a whole copy of the bucket's weights on its own
GPU, each rank of an engine opens the copy on its GPU and takes its part of it, and then the copy is freed.
Needs torch only, so that the training side can export without importing an inference engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl.errors import WeightSyncError
from verl.rollout.weight_file import check_finite, checksum

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
VALUES_AT_ONCE = 2**24  # of a checksum: 128 MiB as int64
DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`: the GPU's number, which is another one in the reader's process


@dataclass(frozen=True)
class ExportedWeights:
    """A bucket of weights in the memory of the trainer's ranks, which stays there until all engines have read it.

    exports: by `device_name`, what `open_exports` reads, once. checksum: with `bit_sum` of the values.
    index, count: which bucket of the version it is, and of how many.
    """

    exports: Mapping[str, bytes]
    version: int
    checksum: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class WeightStream:
    """All buckets of a version, each exported when it is asked for. `release` frees the last one, also half-way."""

    buckets: Iterable[ExportedWeights]
    release: Callable[[], object]


class TensorExport(NamedTuple):
    """A tensor exported twice: PyTorch counts one reader an export, and here one checks and another one loads."""

    name: str
    rebuild: Callable[..., torch.Tensor]
    to_check: tuple[Any, ...]
    to_load: tuple[Any, ...]


def device_name(device: torch.device) -> str:
    """What a device is called in every process: a GPU's UUID, as its number depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def bit_sum(tensor: torch.Tensor) -> int:
    """Sum over rows i of (2i + 1) times the row's values, their bits read as signed integers, modulo 2^64.

    A row is the last dimension, or one value of a vector. One changed bit changes the sum (an odd factor loses none),
    and so do rows that changed places; values that changed places in a row do not. Computed on the tensor's device.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    # In parts, because a sum in another number format first makes a copy in that format.
    parts = rows.view(BITS[tensor.dtype.itemsize]).split(max(1, VALUES_AT_ONCE // rows.shape[1]))
    sums = torch.cat([part.sum(dim=1, dtype=torch.int64) for part in parts])
    return int((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum())


def export_weights(
    tensors: Mapping[str, torch.Tensor], version: int, device: torch.device, index: int = 0, count: int = 1
) -> ExportedWeights:
    """Make `tensors`, all on `device`, readable for another process. The caller keeps them until they have been read.

    Raises `NumericalError` naming the first tensor that has a NaN or an Inf.
    """
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    payload = bytes(ForkingPickler.dumps([_export(name, tensor) for name, tensor in tensors.items()]))
    found = checksum(tensors.items(), bit_sum)
    return ExportedWeights({device_name(device): payload}, version, found, index, count)


def merge_exports(parts: Sequence[ExportedWeights]) -> ExportedWeights:
    """The exports of all ranks as one. Raises `WeightSyncError` when the ranks do not hold the same weights."""
    if len({(part.version, part.index, part.count, part.checksum) for part in parts}) > 1:
        found = ", ".join(f"{part.version}: {part.checksum[:16]}" for part in parts)
        raise WeightSyncError(f"the trainer's ranks hold different weights, by version and checksum: {found}")
    exports = {name: payload for part in parts for name, payload in part.exports.items()}
    return replace(parts[0], exports=exports)


def open_exports(exports: Mapping[str, bytes], device: torch.device) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors exported on `device`, and the update info by which vLLM's "ipc" backend opens them a second time.

    The tensors are the trainer's memory: let go of them soon. Raises `WeightSyncError` when the trainer has none there.
    """
    key = device_name(device)
    if key not in exports:
        raise WeightSyncError(
            f"the trainer exported no weights on the engine's device {key}, only on {', '.join(exports)}; "
            "the roles have to be on the same GPUs"
        )
    # written by the trainer of this very run, which Ray brought here
    received: list[TensorExport] = pickle.loads(exports[key])  # nosec B301
    tensors = {export.name: export.rebuild(*_on_device(export, device)) for export in received}
    info = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "ipc_handles": [{key: export.to_load} for export in received],
    }
    return tensors, info


def _export(name: str, tensor: torch.Tensor) -> TensorExport:
    rebuild, to_check = reduce_tensor(tensor)
    _, to_load = reduce_tensor(tensor)
    return TensorExport(name, rebuild, to_check, to_load)


def _on_device(export: TensorExport, device: torch.device) -> list[Any]:
    arguments = list(export.to_check)
    if export.rebuild is rebuild_cuda_tensor:
        arguments[DEVICE_ARGUMENT] = device.index
    return arguments
