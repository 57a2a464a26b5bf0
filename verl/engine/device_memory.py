"""The calls about memory that only a GPU needs; on CPU they do nothing."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


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
        """Until all copies that were asked for are done."""

    def give_back(self) -> None:
        """Return what nobody uses to the device, for other processes on it."""


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


_STAND_IN: ContextVar[DeviceMemory | None] = ContextVar("stand_in", default=None)


@contextlib.contextmanager
def memory_stands_in(memory: DeviceMemory) -> Iterator[None]:
    """Inside, `device_memory` is this one: for measuring without a GPU."""
    token = _STAND_IN.set(memory)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device`."""
    return _STAND_IN.get() or (CudaMemory(device) if device.type == "cuda" else DeviceMemory())
