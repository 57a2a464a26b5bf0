"""All that an engine needs to resume exactly, in PyTorch's distributed checkpoint format.

Weights, optimizer and anchor are written shard by shard, so that another number of ranks can load them.
For a model with adapters only what is trained is written, and which base it belongs to (`adapter_files`).
Files are written in the background, from copies in CPU memory, while training continues.
"""

from __future__ import annotations

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

from verl.engine.device.sharding import reshard
from verl.engine.files.adapter_files import FILE as BASE_FILE
from verl.engine.files.adapter_files import BaseWeights
from verl.engine.learner import make_moments
from verl.engine.lora import adapted_layers, is_adapter
from verl.errors import CheckpointError
from verl.process.determinism import random_state, set_random_state
from verl.process.storage import Digests, could_not_write, digest

logger = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class Resumable:
    """The models of an engine and the optimizer of one of them. All ranks call all methods, in the same order.

    `models` are named by their role; `optimizer` is that of the role `trained`.
    """

    def __init__(self, models: Mapping[str, nn.Module], trained: str, optimizer: torch.optim.Optimizer) -> None:
        self._models, self._trained, self._optimizer = models, trained, optimizer
        self._base = BaseWeights.of(models[trained])
        self._group: dist.ProcessGroup | None = None
        self._background = ThreadPoolExecutor(1)
        self._written: Future[Digests] | None = None

    def start_saving(self, folder: Path, counters: Mapping[str, float]) -> None:
        """Copy everything and return; files are written to `folder`, which must exist, afterwards.

        Waits for an earlier save; call `saved` before to know whether that failed.
        """
        if self._written is not None:
            self._written.exception()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # the background's own: its collectives meet no others
        for model in self._models.values():
            reshard(model)
        tensors = self._weights() | self._optimizer_state() | _random_state() | _as_tensors(counters)
        if self._base is not None:
            self._base.checksum()  # here, as the background's collectives are on a group of their own
        copies = BlockingAsyncStager().stage(tensors)  # in CPU memory
        self._written = self._background.submit(self._write, copies, folder)

    @property
    def done(self) -> bool:
        """Whether nothing is being written."""
        return self._written is None or self._written.done()

    def saved(self) -> Digests:
        """Wait until all is written. Returns what this rank wrote since the last `start_saving`, {} before the first.

        Raises CheckpointError when it failed, on every call.
        """
        if self._written is None:
            return {}
        return self._written.result()

    def load(self, folder: Path, counters: Mapping[str, float]) -> dict[str, float]:
        """Load what is in `folder`; returns the counters that were saved under these names.

        Raises CheckpointError when something is missing or has another shape.
        """
        try:
            self._check_base(folder)
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            for model in self._models.values():
                reshard(model)
            # The optimizer's tensors are there to be filled if the saved one had taken a step.
            self._optimizer.state.clear()
            if any(name.startswith("optimizer.") for name in saved):
                make_moments(self._optimizer)
            restored = _as_tensors(counters)
            # With another number of ranks some have no random state of their own: they keep the one they started with.
            random = {name: state for name, state in _random_state().items() if name in saved}
            wanted = {**self._weights(), **self._optimizer_state(), **random, **restored}
            _check_saved(wanted, saved)
            dcp.load(wanted, checkpoint_id=folder)
        except (Exception, dcp.CheckpointException) as error:  # the latter is a BaseException
            raise CheckpointError(f"{folder} cannot be loaded: {error}") from error
        set_random_state({name.split(".")[1]: state for name, state in random.items()})
        return {name.removeprefix("counter."): tensor.item() for name, tensor in restored.items()}

    def _check_base(self, folder: Path) -> None:
        if self._base is not None:
            self._base.check(folder)
        elif (folder / BASE_FILE).is_file():
            raise CheckpointError(f"it has adapters ({BASE_FILE}): set lora_rank as that run did, or start a new run")

    def _write(self, tensors: Tensors, folder: Path) -> Digests:
        try:
            return self._write_shards(tensors, folder)
        except dcp.CheckpointException as error:  # a BaseException whose text is the ranks' tracebacks
            first = next(iter(error.failures.values()))[0]
            raise CheckpointError(could_not_write(folder, first)) from error
        except Exception as error:
            raise CheckpointError(could_not_write(folder, error)) from error

    def _write_shards(self, tensors: Tensors, folder: Path) -> Digests:
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        dcp.save(tensors, storage_writer=writer, process_group=self._group)
        rank = dist.get_rank()
        base = [self._base.write(folder)] if rank == 0 and self._base is not None else []
        own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
        return {path.name: digest(path) for path in [*own, *base, *([folder / ".metadata"] if rank == 0 else [])]}

    def _weights(self) -> Tensors:
        return {f"{role}.{name}": t for role, model in self._models.items() for name, t in _tensors(model).items()}

    def _optimizer_state(self) -> Tensors:
        named = self._models[self._trained].named_parameters()
        return {
            f"optimizer.{key}.{name}": value
            for name, parameter in named
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }


def _check_saved(wanted: Tensors, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless all that is wanted was saved, in its shape, and all adapters that were are wanted:
    without one of them the model would be another.
    """
    todo = (
        "resume with that run's model, lora_rank, target_modules and trained_layers, and with an anchor only if it had "
        "one; or start a new run"
    )
    for name, tensor in wanted.items():
        if name not in saved:
            raise CheckpointError(f"it has no {name}: {todo}")
        if saved[name].size != tensor.shape:
            raise CheckpointError(f"{name} has the shape {[*saved[name].size]}, not {[*tensor.shape]}: {todo}")
    for name in saved:
        if name not in wanted and is_adapter(name) and not name.startswith("optimizer."):
            raise CheckpointError(f"it has {name}, an adapter that this run has not: {todo}")


def _tensors(model: Any) -> Tensors:
    """Parameters and saved buffers, sharded as they are; with adapters, what is trained."""
    if any(adapted_layers(model)):
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def _as_tensors(counters: Mapping[str, float]) -> Tensors:
    return {f"counter.{name}": torch.tensor(value, dtype=torch.float64) for name, value in counters.items()}


def _random_state() -> Tensors:
    return {f"random.{kind}.{dist.get_rank()}": state for kind, state in random_state().items()}
