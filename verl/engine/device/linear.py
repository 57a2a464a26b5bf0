"""Matrix products of float32 on CPUs, by oneDNN where that is faster.

PyTorch multiplies float32 by MKL, which uses AVX-512 on Intel's CPUs only. On those of other makers oneDNN, which
comes with PyTorch, is up to 2.4 times as fast. Sums are in float32 in either case.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from verl.engine.device.runtime import kind_of
from verl.engine.device.torch_private import has_onednn_linear, onednn_linear


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
