"""A device that computes nothing: the engine's code runs on it with shapes only, as rank 0 of any number of ranks.

PyTorch's fake tensors stand for the device's memory and its fake process group for the other ranks. What lies on the
host (batches, row numbers, the cut into micro-batches) are real tensors and is really computed. Both say that they are
on the CPU: an operation belongs to the device when one of its inputs does, and so does memory that is taken unfilled
(which is how FSDP2 takes its buffers). A number that is read from the device (a loss, a norm) is 0.5, and a truth true.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl.engine.device.memory import DeviceMemory, memory_stands_in
from verl.engine.device.runtime import cpu_stands_for
from verl.planning.dry_run.learned import CPU, Learned
from verl.planning.dry_run.memory import Memory
from verl.planning.dry_run.passes import Operation, Work, workspace_bytes
from verl.planning.dry_run.torch_private import (
    READ_NUMBER,
    WAIT,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    active_fake_mode,
    collective_ops,
    cut_for_rank_0,
    no_strided_shards,
    tree_leaves,
)

aten = torch.ops.aten
DEVICE_OF = torch.ops.prim.device.default
META = torch.device("meta")


class Seen(NamedTuple):
    """The workspace of an operation, and its work."""

    workspace: int
    operation: Operation | None


class FakeDevice(TorchDispatchMode):
    """Sees everything that PyTorch does inside `running()`, operation by operation.

    `kind` ("cpu" or "cuda") says which code paths the engines take.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tensors = FakeTensorMode(allow_non_fake_inputs=True)
        self.tensors.cache_enabled = False  # `learned` is quicker
        self.learned = Learned(self.tensors)
        self.memory = Memory()
        self.work = Work()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and PyTorch's guard takes as long as looking an operation up

    def restart(self) -> None:
        """Start a measurement."""
        self.memory.restart()
        self.work = Work()

    @contextlib.contextmanager
    def running(self, num_ranks: int) -> Iterator[None]:
        """Context in which this process is rank 0 of `num_ranks` simulated ranks."""
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            with contextlib.ExitStack() as stack:
                # So that the collector's counts, and with them the peaks, do not depend on what was before.
                stack.enter_context(frozen_heap())
                stack.enter_context(cpu_stands_for(self.kind))
                stack.enter_context(memory_stands_in(_HostBlocks(self)))
                stack.enter_context(_seen_resizes(self.memory))
                stack.enter_context(cut_for_rank_0())
                stack.enter_context(no_strided_shards())
                stack.enter_context(self)
                yield
        finally:
            dist.destroy_process_group()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it calls again with its local parts
        kwargs = kwargs or {}
        if not types:  # plain tensors
            return self._on_host(func, args, kwargs)
        # Most operations have inputs of the device only, and are looked up. Of the rest, PyTorch's fake tensors compute
        # those with an input of the device, and PyTorch itself those of the host.
        known = self.learned.key(func, args, kwargs)
        if known is not None:
            return self._on_device(func, types, args, kwargs, *known)
        if not any(self._is_mine(leaf) for leaf in tree_leaves((args, kwargs))):
            return self._on_host(func, args, kwargs)
        return self._dispatched(func, types, args, kwargs)[0]

    def _on_device(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: Any,
        inputs: Sequence[FakeTensor],
    ) -> Any:
        """Do an operation whose inputs are all the device's."""
        # The first operation of a kind is computed, and remembered if it can be.
        learned = self.learned.look_up(key)
        if learned is None:
            out, seen = self._dispatched(func, types, args, kwargs)
            if seen is not None:
                self.learned.learn(key, func, inputs, out, seen)
            return out
        # A later one only makes the tensors, and adds the same memory and work to the measurement.
        seen = learned.what
        self.memory.workspace(seen.workspace)
        out = learned.make(self.tensors, inputs)
        for leaf in [out] if learned.container is None else out:
            self.memory.see(leaf.untyped_storage())
        if seen.operation is not None:
            self.work.operations.append(seen.operation)
        return out

    def _dispatched(
        self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Seen | None]:
        """The output that PyTorch computes, and the operation's workspace and work, unless it is a collective."""
        if func is READ_NUMBER:  # a number is read from the device: see the module's docstring
            dtype = args[0].dtype
            return (True if dtype == torch.bool else 0.5 if dtype.is_floating_point else 1), None
        if func is WAIT:
            return args[0], None
        workspace = workspace_bytes(func, args)
        self.memory.workspace(workspace)
        out = self.tensors.dispatch(func, types, args, kwargs)
        operation = self._seen(func, args, kwargs, out)
        return out, None if func in collective_ops else Seen(workspace, operation)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # What takes memory unfilled: a buffer, or a weight that had none.
        unfilled = func is aten.empty.memory_format or (func is aten.empty_like.default and args[0].is_meta)
        if not unfilled or kwargs.get("device") == META or active_fake_mode() is not None:  # DTensor's, to learn shapes
            return func(*args, **kwargs)
        # Without the fake mode's own dispatch, which takes several times as long for the same tensor.
        out = FakeTensor(self.tensors, func(*args, **{**kwargs, "device": META}), CPU)
        self._seen(func, args, kwargs, out)
        return out

    def _seen(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Operation | None:
        for leaf in tree_leaves(out):
            if self._is_mine(leaf):
                self.memory.see(leaf.untyped_storage())
        return self.work.count(func, args, kwargs, out)

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
        self._device.memory.give_back()


@contextlib.contextmanager
def _seen_resizes(memory: Memory) -> Iterator[None]:
    """Context in which `memory` sees a storage's `resize_`, which is no operation of a tensor."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        memory.resized(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


_frozen = 0  # contexts of `frozen_heap` that are open


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Context in which the garbage collector passes over all objects that were there before. Looking through them takes
    a quarter of a second, so what does several dry runs opens one around all; the end of the outermost ends it.
    """
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen += 1
    try:
        yield
    finally:
        _frozen -= 1
        if not _frozen:
            gc.unfreeze()
