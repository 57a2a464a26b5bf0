"""The calls about memory that only a GPU needs; on CPU they do nothing."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


class DeviceMemory:
    """Of a CPU: tensors are where they are."""

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


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of `device`."""
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()
