"""vLLM's CUDA platform on a machine without a GPU: the real class, with stand-ins for what asks the driver alone.

Enough for vLLM's configuration objects, which decide by the platform; nothing runs on it.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType


def pretend_cuda() -> None:
    """To be called before anything of vLLM is imported."""
    for kernels in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules[kernels] = ModuleType(kernels)
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * 2**30

        @classmethod
        def device_count(cls) -> int:
            return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        def is_cumem_allocator_available(self) -> bool:
            return True

    vllm.platforms._current_platform = FakeCuda()
