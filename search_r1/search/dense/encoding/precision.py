"""The device to compute on, and a number format that is fast there."""

from __future__ import annotations

import torch

from search_r1.errors import EncoderError

PRECISIONS = ("auto", "half", "float32", "bfloat16", "float16")
_CPU_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; emulated, it is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in _CPU_BF16)


def resolve_device(requested: str) -> torch.device:
    """`cpu`, `cuda`, `cuda:1`, or `auto`: a GPU if there is one."""
    if requested == "auto":
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(requested)


def resolve_precision(requested: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 if the hardware supports it, else float16 on a GPU and float32 on a CPU.

    `half` is the published `--use_fp16`: float16 on a GPU, as `auto` on a CPU. Raises `EncoderError` for an unknown
    name, and for float16 on a CPU, which no CPU computes fast.
    """
    if requested not in PRECISIONS:
        raise EncoderError(f"precision {requested!r} is not one of {', '.join(PRECISIONS)}")
    on_gpu = device.type == "cuda"
    if requested == "float16" and not on_gpu:
        raise EncoderError("precision float16 needs a GPU; use auto, bfloat16 or float32 on a CPU")
    if requested == "half":
        requested = "float16" if on_gpu else "auto"
    if requested != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[requested]
    if on_gpu:
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def precision_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16` or `float16`."""
    return str(dtype).removeprefix("torch.")
