"""All that an engine needs to go on as if nothing had happened, in PyTorch's distributed checkpoint format.

Weights, optimizer and anchor are written shard by shard, so that any number of ranks reads what any other number wrote.
Writing goes on in the background while training does: what is written are copies in CPU memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from verl.engine.sharding import reshard
from verl.errors import CheckpointError

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Digests = dict[str, tuple[int, str]]
"""By file name: bytes, and SHA-256 in hex."""
_READ_BYTES = 2**24


class Resumable:
    """The models of an engine and the optimizer of one of them. All ranks call all methods, in the same order.

    `models` by role; `optimizer` is that of the model `trained`.
    """

    def __init__(self, models: Mapping[str, nn.Module], trained: str, optimizer: torch.optim.Optimizer) -> None:
        self._models, self._trained, self._optimizer = models, trained, optimizer
        self._group = dist.new_group(backend="gloo")  # the background's own: its collectives meet no others
        self._background = ThreadPoolExecutor(1)
        self._written: Future[Digests] | None = None

    def start_saving(self, folder: Path, counters: Mapping[str, float]) -> None:
        """Copy everything and return; files are written to `folder` (which is there) afterwards.

        Raises CheckpointError when an earlier save failed.
        """
        self.saved()
        for model in self._models.values():
            reshard(model)
        tensors = self._weights() | self._optimizer_state() | self._random_state() | _as_tensors(counters)
        copies = BlockingAsyncStager().stage(tensors)  # in CPU memory
        self._written = self._background.submit(self._write, copies, folder)

    @property
    def done(self) -> bool:
        """Whether nothing is being written."""
        return self._written is None or self._written.done()

    def saved(self) -> Digests:
        """Wait for the end of writing: what this rank has written since `start_saving` ({} when that was told before).

        Raises CheckpointError when it failed.
        """
        if self._written is None:
            return {}
        written, self._written = self._written, None
        try:
            return written.result()
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            raise CheckpointError(f"the state could not be written: {error}; check the disk") from error

    def load(self, folder: Path, counters: Mapping[str, float]) -> dict[str, float]:
        """Put back what is in `folder`; returns the counters that were saved under these names.

        Raises CheckpointError when something is missing or has another shape.
        """
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
            for model in self._models.values():
                reshard(model)
            self._prepare_optimizer(any(name.startswith("optimizer.") for name in saved))
            found = _as_tensors(counters)
            # With another number of ranks some have no random state of their own; nothing on them drew from it.
            random = {name: state for name, state in self._random_state().items() if name in saved}
            dcp.load({**self._weights(), **self._optimizer_state(), **random, **found}, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        self._set_random_state(random)
        return {name.removeprefix("counter."): tensor.item() for name, tensor in found.items()}

    def _write(self, tensors: Tensors, folder: Path) -> Digests:
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        dcp.save(tensors, storage_writer=writer, process_group=self._group)
        rank = dist.get_rank()
        own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
        return {path.name: digest(path) for path in [*own, *([folder / ".metadata"] if rank == 0 else [])]}

    def _weights(self) -> Tensors:
        return {f"{role}.{name}": t for role, model in self._models.items() for name, t in _tensors(model).items()}

    def _optimizer_state(self) -> Tensors:
        named = self._models[self._trained].named_parameters()
        return {
            f"optimizer.{key}.{name}": value
            for name, parameter in named
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _prepare_optimizer(self, used: bool) -> None:
        """Make the optimizer's tensors, to be filled, if the saved one had been used."""
        self._optimizer.state.clear()
        if not used:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    def _random_state(self) -> Tensors:
        states = {f"random.cpu.{dist.get_rank()}": torch.get_rng_state()}
        if torch.cuda.is_available():
            states[f"random.cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state()
        return states

    def _set_random_state(self, states: Tensors) -> None:
        for name, state in states.items():
            torch.cuda.set_rng_state(state) if ".cuda." in name else torch.set_rng_state(state)


def digest(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    found, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            found.update(part)
            size += len(part)
    return size, found.hexdigest()


def _tensors(model: Any) -> Tensors:
    """Parameters and saved buffers, sharded as they are."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _as_tensors(counters: Mapping[str, float]) -> Tensors:
    return {f"counter.{name}": torch.tensor(value, dtype=torch.float64) for name, value in counters.items()}
