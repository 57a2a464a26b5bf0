"""The calls about memory that differ between a GPU and a CPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple

import psutil
import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from verl.engine.inside import inside


class Usage(NamedTuple):
    """Bytes at the worst moment: of this process, and on its device by all processes (None: there is no device)."""

    process: int
    device: int | None


class DeviceMemory:
    """Of a CPU: tensors are where they are."""

    def host_block(self, num_bytes: int) -> torch.Tensor:
        """Host memory [num_bytes] for copies from and to the device."""
        host = torch.empty(num_bytes, dtype=torch.uint8)
        self.pin(host)
        return host

    def pin(self, host: torch.Tensor) -> None:
        """Lock the tensor's pages, so that copies from and to it run beside other work. Undone when it is freed."""

    def wait(self) -> None:
        """Wait until all requested copies are done."""

    def give_back(self) -> None:
        """Return what nobody uses to the device, for other processes on it."""

    def restart_peak(self) -> None:
        """Begin a new `usage`."""

    def usage(self) -> Usage:
        """Since `restart_peak`. On CPU no peak is kept: it is the memory of the process as it is now."""
        return Usage(psutil.Process().memory_info().rss, None)


class CudaMemory(DeviceMemory):
    """Of a GPU."""

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
        """What PyTorch's allocator held at most; what others have on the device is taken as it is now."""
        free, total = torch.cuda.mem_get_info(self.device)
        peak = torch.cuda.max_memory_reserved(self.device)
        return Usage(peak, total - free - torch.cuda.memory_reserved(self.device) + peak)


_STAND_IN: ContextVar[DeviceMemory | None] = ContextVar("stand_in", default=None)


def memory_stands_in(memory: DeviceMemory) -> AbstractContextManager[None]:
    """Inside, `device_memory` is this one: for measuring without a GPU."""
    return inside(_STAND_IN, memory)


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device`."""
    return _STAND_IN.get() or (CudaMemory(device) if device.type == "cuda" else DeviceMemory())
