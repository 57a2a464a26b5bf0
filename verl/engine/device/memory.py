"""The calls about memory that differ between a GPU and a CPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from verl.engine.device.torch_private import pin_memory, unpin_memory
from verl.errors import DeviceOutOfMemory
from verl.phases import RESIDENT, Phase
from verl.process.inside import inside

GIB = 2**30
Method = TypeVar("Method", bound=Callable[..., Any])


class Usage(NamedTuple):
    """Peak bytes: of this process, and of all processes on its device (None: there is no device)."""

    process: int
    device: int | None


class DeviceMemory:
    """Memory of a CPU: there is nothing to pin, wait for or free."""

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Host memory [num_bytes] for copies from and to the device."""
        host = torch.empty(num_bytes, dtype=torch.uint8)
        self.pin(host)
        return host

    def pin(self, host: torch.Tensor) -> None:
        """Pin the tensor's pages, so that copies from and to it overlap with other work. Undone when it is freed."""

    def wait(self) -> None:
        """Wait until all requested copies are done."""

    def give_back(self) -> None:
        """Return unused memory to the device, for other processes."""

    def restart_peak(self) -> None:
        """Reset the peak that `usage` reports."""

    def usage(self) -> Usage:
        """Peak since `restart_peak`. On a CPU no peak is kept: the memory that the process has now."""
        return Usage(psutil.Process().memory_info().rss, None)


class CudaMemory(DeviceMemory):
    """Memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, host: torch.Tensor) -> None:
        # Not `Tensor.pin_memory`: PyTorch's own pinned blocks are rounded up to a power of two.
        if host.nbytes:
            pin_memory(host.data_ptr(), host.nbytes)
            weakref.finalize(host, unpin_memory, host.data_ptr())

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        gc.collect()  # a cycle of Python objects may hold tensors
        torch.cuda.empty_cache()

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def usage(self) -> Usage:
        """Peak of PyTorch's allocator; other processes count with what they have on the device now."""
        free, total = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_reserved(self.device)
        return Usage(peak, total - free - torch.cuda.memory_reserved(self.device) + peak)


_STAND_IN: ContextVar[DeviceMemory | None] = ContextVar("stand_in", default=None)


def memory_stands_in(memory: DeviceMemory) -> AbstractContextManager[None]:
    """Inside, `device_memory` returns `memory`: for measuring without a GPU."""
    return inside(_STAND_IN, memory)


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device`."""
    return _STAND_IN.get() or (CudaMemory(device) if device.type == "cuda" else DeviceMemory())


# The memory that a rank took in each phase of a step, and the time: for metrics and timeline.


CPU_IS_FULL = "can't allocate memory"  # PyTorch's own words: there is no type of error for it
BATCHES = "smaller micro-batches (*_micro_batch_size, or *_max_token_len_per_gpu with dynamic batches)"
SAVING = {
    Phase.SAMPLE: "the *_offload keys, a lower rollout.gpu_memory_utilization",
    Phase.SCORE: f"{BATCHES}, actor.head_chunk_tokens=256, rollout.free_cache_engine=true, the *_offload keys",
    Phase.UPDATE: f"{BATCHES}, model.enable_gradient_checkpointing=true, actor.head_chunk_tokens=256, "
    "rollout.free_cache_engine=true, the *_offload keys",
    Phase.SYNC: "the *_offload keys, a lower rollout.gpu_memory_utilization",
}
"""Settings that lower what a phase needs."""


class MemoryMeter:
    """Peak memory by phase since the last `metrics`."""

    def __init__(self, memory: DeviceMemory, role: str, rank: int = 0) -> None:
        self._memory, self._role, self._rank = memory, role, rank
        self._most: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count the memory used inside for `phase`. Raises `DeviceOutOfMemory` in place of PyTorch's error."""
        self._memory.restart_peak()
        with self.explaining(f"in phase {phase}, in which {', '.join(sorted(RESIDENT[phase]))} stay", SAVING[phase]):
            yield
        self.note(phase)

    @contextlib.contextmanager
    def explaining(self, when: str, saving: str = SAVING[Phase.SYNC]) -> Iterator[None]:
        """Raise `DeviceOutOfMemory` in place of PyTorch's error, on a GPU or on a CPU, with the settings that save."""
        try:
            yield
        except RuntimeError as error:
            # PyTorch has a type of error for a full GPU. On a CPU it is a RuntimeError, known by its text.
            if not (isinstance(error, torch.OutOfMemoryError) or CPU_IS_FULL in str(error)):
                raise
            usage = self._memory.usage()
            of_all = "" if usage.device is None else f", all processes of the device {usage.device / GIB:.1f}"
            # PyTorch's own advice is cut off: the settings that help here are named before it.
            said, _, _ = " ".join(str(error).split()).partition(" If reserved but unallocated")
            raise DeviceOutOfMemory(
                f"{self._role}, rank {self._rank}: no memory left {when}; this process had {usage.process / GIB:.1f} "
                f"GiB at most{of_all}. What lowers it: {saving}; the dry run (python -m verl.trainer.dry_run with the "
                f"settings of the run) says by how much. PyTorch says: {said}"
            ) from error

    def note(self, phase: Phase) -> None:
        """Count the peak since `during` began, and the memory in use now."""
        usage = self._memory.usage()
        self._count(f"memory_gib/{phase}/{self._role}", usage.process)
        if usage.device is not None:
            self._count(f"memory_gib/{phase}/device", usage.device)

    def metrics(self) -> dict[str, float]:
        """The peaks in GiB. `memory_gib/{phase}/{role}`: of this process; on a GPU the peak of PyTorch's allocator.
        `memory_gib/{phase}/device`: of all processes together on its GPU.
        """
        most, self._most = self._most, {}
        return most

    def _count(self, name: str, num_bytes: int) -> None:
        self._most[name] = max(self._most.get(name, 0.0), num_bytes / GIB)


def in_phase(phase: Phase) -> Callable[[Method], Method]:
    """Count the memory and the time that a method takes; its object has a `MemoryMeter` named `memory` and a
    `SpanRecorder` named `spans`.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def counted(self: Any, *args: Any, **named: Any) -> Any:
            with self.spans(method.__name__), self.memory.during(phase):
                return method(self, *args, **named)

        return counted  # type: ignore[return-value]

    return decorate
