"""Weights from trainer to samplers on one GPU: the sampler's process maps the trainer's memory (CUDA IPC).

Every rank of the actor gathers the bucket's weights on its own GPU and exports them there; each rank of an engine opens
the copy on its GPU and takes its part.
Needs torch only, so that the training side can export without importing an inference engine.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl.engine.device.sharding import own_values
from verl.engine.device.torch_private import set_allocator
from verl.engine.files.checksum import key_of, require_finite, word_sum
from verl.weight_sync.buckets import ExportedWeights, Version, gathered

DEVICE_ARGUMENT = 6  # of `rebuild_cuda_tensor`: the GPU's number, which differs in the reader's process


class TensorExport(NamedTuple):
    """A tensor that another process can open once."""

    name: str
    rebuild: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...]


def device_name(device: torch.device) -> str:
    """A device's name in every process: a GPU's UUID, as its number depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class DeviceBuckets:
    """Buckets on this rank's GPU: one at a time, since the engine's weights and the shards are there too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held: dict[str, torch.Tensor] = {}

    def export(self, version: Version, index: int) -> ExportedWeights:
        """Gather bucket `index`, which is kept until the next one or `release`. All ranks call it.

        Raises `NumericalError` naming the first weight that has a NaN or an Inf.
        """
        # The last bucket is freed before the next one is gathered: there is memory for one.
        self.held = {}
        with plain_segments(self.device):
            self.held = gathered([(name, version.named[name]) for name in version.plan[index]], version.dtype)
        # Each rank sums the values that belong to it; added up, they are the checksums of the whole weights.
        sums = {}
        for name, tensor in self.held.items():
            own = own_values(version.named[name])
            values = tensor.view(-1)[own]
            require_finite(name, values)
            sums[key_of(name, tensor.dtype, tensor.shape)] = word_sum(values, own.start * tensor.itemsize)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the reading process does not wait for queued work
        payload = ForkingPickler.dumps(
            [TensorExport(name, *reduce_tensor(tensor)) for name, tensor in self.held.items()]
        )
        exports = {device_name(self.device): bytes(payload)}
        return ExportedWeights(exports, version.number, sums, index, len(version.plan))

    def release(self) -> None:
        """Free the bucket, once the engines have read it."""
        self.held = {}
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.release()


@contextlib.contextmanager
def plain_segments(device: torch.device) -> Iterator[None]:
    """Memory that is allocated inside can be exported, also with `expandable_segments:True`, PyTorch's own advice where
    memory is fragmented: another process gets such a segment by `pidfd_getfd`, which containers do not permit.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    plain = re.sub(r"(expandable_segments\s*:\s*)True", r"\1False", settings)
    if device.type != "cuda" or plain == settings:
        yield
        return
    set_allocator(plain)
    try:
        yield
    finally:
        set_allocator(settings)


def open_exports(payload: bytes, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors exported on `device`. They are the trainer's memory: release them soon."""
    # written by the trainer of this very run, which Ray brought here
    received: list[TensorExport] = pickle.loads(payload)  # nosec B301
    return {export.name: export.rebuild(*_on_device(export, device)) for export in received}


def _on_device(export: TensorExport, device: torch.device) -> list[Any]:
    arguments = list(export.arguments)
    if export.rebuild is rebuild_cuda_tensor:
        arguments[DEVICE_ARGUMENT] = device.index
    return arguments
