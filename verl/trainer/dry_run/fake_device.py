"""A device that computes nothing: the engine's code runs on it with shapes alone, as rank 0 of any number of ranks.

PyTorch's fake tensors stand for the device's memory and its fake process group for the other ranks. What lies on the
host (batches, row numbers, the cut into micro-batches) are real tensors and is really computed. Both say that they are
on the CPU: an operation belongs to the device when one of its inputs does, and so does memory that is taken unfilled
(which is how FSDP2 takes its buffers). A number that is read from the device (a loss, a norm) is 0.5, and a truth true.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.engine.device import cpu_stands_for
from verl.engine.device_memory import DeviceMemory, memory_stands_in
from verl.trainer.dry_run.memory import Memory
from verl.trainer.dry_run.work import Work, workspace_bytes

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


class FakeDevice(TorchDispatchMode):
    """Everything that PyTorch does inside of `running()` is seen here, operation by operation.

    `kind` ("cpu" or "cuda") says whose paths the engines take.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self.memory = Memory()
        self.work = Work()

    def restart(self) -> None:
        """Begin to measure."""
        self.memory.restart()
        self.work = Work()

    @contextlib.contextmanager
    def running(self, num_ranks: int) -> Iterator[None]:
        """As rank 0 of `num_ranks` that only seem to be there."""
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            with cpu_stands_for(self.kind), memory_stands_in(_HostBlocks(self)), _seen_resizes(self.memory), self:
                yield
        finally:
            dist.destroy_process_group()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it calls again with its local parts
        kwargs = kwargs or {}
        if not any(self._is_mine(leaf) for leaf in tree_leaves((args, kwargs))):
            return self._on_host(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return _a_number(args[0].dtype)
        if func is WAIT:
            return args[0]
        self.memory.workspace(workspace_bytes(func, args))
        return self._seen(func, args, kwargs, func(*args, **kwargs))

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not _takes_memory(func, args, kwargs) or active_fake_mode() is not None:  # DTensor has one, to learn shapes
            return func(*args, **kwargs)
        with self.tensors:
            return self._seen(func, args, kwargs, func(*args, **kwargs))

    def _seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
        for leaf in tree_leaves(out):
            if self._is_mine(leaf):
                self.memory.see(leaf.untyped_storage())
        self.work.count(func, args, kwargs, out)
        return out

    def _is_mine(self, leaf: Any) -> bool:
        return isinstance(leaf, FakeTensor) and leaf.fake_mode is self.tensors  # DTensor has fake tensors of its own


class _HostBlocks(DeviceMemory):
    """Tells the host's memory from the device's where the device only seems to be there."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def host_block(self, num_bytes: int) -> torch.Tensor:
        with self._device.tensors:
            host = torch.empty(num_bytes, dtype=torch.uint8)
        self._device.memory.hide(host.untyped_storage())
        return host

    def give_back(self) -> None:
        gc.collect()


def _takes_memory(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether memory is taken unfilled: for a buffer, or for a weight that had none."""
    if kwargs.get("device") == torch.device("meta"):
        return False
    return func is aten.empty.memory_format or (func is aten.empty_like.default and args[0].is_meta)


def _a_number(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 0.5 if dtype.is_floating_point else 1


@contextlib.contextmanager
def _seen_resizes(memory: Memory) -> Iterator[None]:
    """A storage's `resize_` is no operation of a tensor."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        memory.resized(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
