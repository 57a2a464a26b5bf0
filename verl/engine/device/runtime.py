"""Where the model runs: device, process group, number formats, threads, and how float32 is multiplied on CPUs.

PyTorch multiplies float32 by MKL, which uses AVX-512 on Intel's CPUs only. On those of other makers oneDNN, which comes
with PyTorch, is up to 2.4 times as fast. Sums are in float32 in either case.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from verl.engine.device.torch_private import has_onednn_linear, onednn_linear
from verl.errors import ConfigError
from verl.process.inside import inside

logger = logging.getLogger(__name__)

_STANDS_FOR: ContextVar[str | None] = ContextVar("stands_for", default=None)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")  # PyTorch's names of what multiplies it in hardware
LEAST_IN_BFLOAT16 = 50_000_000  # parameters: a CPU computes smaller models in float32 about as fast


@dataclass(frozen=True)
class Precision:
    """`param_dtype`: weights and activations in forward and backward; `reduce_dtype`: gradient sums over ranks."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


def cpu_stands_for(kind: str) -> AbstractContextManager[None]:
    """Inside, a CPU takes the code paths of that kind of device ("cuda"): for measuring without one."""
    return inside(_STANDS_FOR, kind)


def kind_of(device: torch.device) -> str:
    """The kind of device whose code paths `device` takes: `cuda` or `cpu`."""
    return _STANDS_FOR.get() or device.type


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one. Raises ConfigError for an unknown name or an absent
    CUDA device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device '{name}' is unknown; use auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but this PyTorch sees no CUDA device; use auto or cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def resolve_precision(device: torch.device, param_dtype: str, reduce_dtype: str, num_params: int) -> Precision:
    """The number formats of those names for a model of so many parameters. `auto` is bfloat16 on CUDA, and for a large
    model on a CPU that multiplies it in hardware; else float32. Master weights stay float32 whatever is chosen here.
    """
    if param_dtype == "auto":
        large = num_params >= LEAST_IN_BFLOAT16
        param_dtype = "bfloat16" if kind_of(device) == "cuda" or (large and cpu_has_bfloat16()) else "float32"
    for name in (param_dtype, reduce_dtype):
        if name not in DTYPES:
            raise ConfigError(f"number format '{name}' is unknown; use one of {', '.join(DTYPES)}")
    return Precision(DTYPES[param_dtype], DTYPES[reduce_dtype])


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without, float32 is several times as fast."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in CPU_BFLOAT16)


def resolve_engine_dtype(device: torch.device, name: str, num_params: int) -> torch.dtype:
    """The number format of that name for an engine; `auto` is that of a trainer of the same model on such a device."""
    return DTYPES[name] if name != "auto" else resolve_precision(device, name, "float32", num_params).param_dtype


def resolve_head_dtype(name: str, precision: Precision) -> torch.dtype:
    """The number format of the head; `auto` is bfloat16 when the decoder runs in it, else float32."""
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if precision.param_dtype is torch.bfloat16 else torch.float32


def backend_of(device: torch.device) -> str:
    """The backend of a process group: on CUDA gloo for CPU tensors (off-loaded gradients, metrics), NCCL for others."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def init_process_group(
    rank: int, world_size: int, init_method: str, device: torch.device, timeout_s: float = 1800.0
) -> None:
    """Join the group of `world_size` processes that meet at `init_method` (tcp://host:port or file:///path).

    A collective fails when one of them keeps the others waiting for `timeout_s` seconds. On CUDA the group is bound to
    the device: NCCL connects all ranks here, once, and the groups of a mesh are split from that connection.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(device),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def device_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """The mesh of all ranks, with one dimension `shard`; with groups of `fsdp_size` ranks two: `replicate` over the
    groups, `shard` within each.

    A group has consecutive ranks: those of one node, if it has that many. Raises ConfigError for a size that does not
    divide the number of ranks.
    """
    num_ranks = dist.get_world_size()
    size = num_ranks if fsdp_size == -1 else fsdp_size
    if size < 1 or num_ranks % size:
        raise ConfigError(f"fsdp_size is {fsdp_size}; it must divide the number of workers, {num_ranks}, or be -1")
    if size == num_ranks:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (num_ranks // size, size), mesh_dim_names=("replicate", "shard"))


def set_threads(num_threads: int | None) -> None:
    """Use `num_threads` CPU threads in this process; None keeps the environment's setting.

    More threads than free cores make a small model several times slower.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def prepare_matmul(device: torch.device, precision: Precision) -> None:
    """Let float32 products (a head in float32) use TF32 when the inputs are bfloat16 anyway, which loses no bits."""
    if device.type == "cuda" and precision.param_dtype is torch.bfloat16:
        torch.set_float32_matmul_precision("high")


class OneDnnLinear(nn.Linear):
    """Computes what `nn.Linear` does, by `linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., out]: the layer's output."""
        return linear(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Have the linear layers of `model` compute by `linear`. Call it before the model is sharded."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


def linear(input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """[..., O] for `input` [..., I]: x W^T + b, with gradients, for tensors of any dtype on any device."""
    if not _is_for_onednn(input, weight_OI):
        return functional.linear(input, weight_OI, bias_O)
    return _Linear.apply(input, weight_OI, bias_O)  # type: ignore[no-any-return]


def matmul(left_AB: torch.Tensor, right_BC: torch.Tensor) -> torch.Tensor:
    """[A, C], without gradients. The result may be transposed in memory."""
    if not _is_for_onednn(left_AB, right_BC):
        return left_AB @ right_BC
    if len(left_AB) > right_BC.shape[1] and left_AB.stride(0) == 1:  # oneDNN is faster with the smaller one first
        return onednn_linear(right_BC.T, left_AB, None).T
    return onednn_linear(left_AB, right_BC.T, None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input, weight_OI)
        return onednn_linear(input, weight_OI, bias_O)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight_OI = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            matmul(grad_NO, weight_OI).view(input.shape) if of_input else None,
            matmul(grad_NO.T, input.reshape(-1, input.shape[-1])) if of_weight else None,
            grad_NO.sum(0) if of_bias else None,
        )


def _is_for_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    is_float32 = kind_of(left.device) == "cpu" and left.dtype == right.dtype == torch.float32
    return is_float32 and left.numel() > 0 and right.numel() > 0 and onednn_is_faster()


@cache
def onednn_is_faster() -> bool:
    """Whether this machine's CPU has AVX-512, which MKL does not use."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_onednn_linear():
        return False
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "GenuineIntel" not in described
