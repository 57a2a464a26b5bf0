"""GPUs and the processes on them, as nvidia-smi tells it. Only asks: nothing that anybody runs is touched."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

TIMEOUT_S = 60
GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,utilization.gpu,mig.mode.current,compute_mode"
PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_gpu_memory"


@dataclass(frozen=True)
class Gpu:
    """Memory in MiB; 0 where the driver does not say."""

    index: str
    uuid: str
    name: str
    driver: str
    total: float
    used: float
    utilization: str
    mig: str
    compute_mode: str


@dataclass(frozen=True)
class GpuProcess:
    """`used` in MiB, as text: a container may not be told."""

    uuid: str
    pid: str
    name: str
    used: str


def smi(*words: str) -> str | None:
    """What nvidia-smi prints; None when there is none, or it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpus() -> list[Gpu]:
    rows = _rows("--query-gpu", GPU_FIELDS)
    return [Gpu(*row[:4], _mib(row[4]), _mib(row[5]), *row[6:]) for row in rows]


def gpu_processes() -> list[GpuProcess]:
    return [GpuProcess(*row) for row in _rows("--query-compute-apps", PROCESS_FIELDS)]


def visible(found: list[Gpu], variables: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order: numbers, or UUIDs or their beginnings."""
    asked = variables.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return found
    named = [name.strip() for name in asked.split(",") if name.strip()]
    fitting = ([gpu for gpu in found if name == gpu.index or _begins(gpu.uuid, name)][:1] for name in named)
    return [gpu for one in fitting for gpu in one]


def mig_devices() -> dict[str, str]:
    """The index of the GPU that each MIG device is a part of, by the device's UUID."""
    found: dict[str, str] = {}
    gpu = ""
    for line in (smi("-L") or "").splitlines():
        if whole := re.match(r"GPU (\d+):", line):
            gpu = whole[1]
        elif part := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            found[part[1]] = gpu
    return found


def _begins(uuid: str, name: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def _rows(query: str, fields: str) -> list[list[str]]:
    text = smi(f"{query}={fields}", "--format=csv,noheader,nounits") or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


def _mib(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
