"""The node as its owner sees it: driver, GPUs and who uses them, the links between, host memory, limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import psutil

from first_run.nvidia import Gpu, GpuProcess, gpu_processes, gpus, mig_devices, smi, visible
from first_run.result import Result, judged
from first_run.site import Site
from url_text import mask_text

GIB = 2**30
MIN_DRIVER = 580  # of CUDA 13
NO_SLICES = (
    "a run needs whole GPUs: a process sees one slice at most, NCCL does not connect slices, and trainer and engine, "
    "which are several processes, share the memory of a GPU"
)
FREE_SHARE = 0.9  # of a GPU's memory, that is to be free
MIN_SHARED_GIB = 1.0  # NCCL and Ray need it; a container of Docker has 64 MB unless it is told otherwise
MIN_FILES = 4096
TELLING = ("CUDA_", "NCCL_", "VLLM_", "RAY_", "PYTORCH_", "TORCH_", "OMP_", "HF_HUB_OFFLINE")  # of variables
RAW = {"topology": ("topo", "-m"), "nvlink": ("nvlink", "--status"), "nvidia_smi": ("-q",)}


def look(site: Site) -> Result:
    """FAIL says what to change; the rest is for the reader of the report."""
    found, processes = gpus(), gpu_processes()
    own = visible(found, os.environ)
    raw = {name: smi(*words) or "nvidia-smi has no answer\n" for name, words in RAW.items()}
    for name, text in raw.items():
        site.log(name).write_text(text, encoding="utf-8")
    problems = [*(gpu_problems(own, found, processes) if site.on_gpu else ()), *host_problems(site.on_gpu)]
    lines = [*host(site.scratch), "", *gpu_table(found, own, processes)]
    if found:
        lines += ["", "```text", raw["topology"].rstrip(), "```"]
    what = f"{len(own)} of {len(found)} GPUs visible, driver {found[0].driver}" if found else "no GPU"
    figures = "; ".join(problems) or f"{what}; {psutil.virtual_memory().total / GIB:.0f} GiB of host memory"
    return judged(not problems, figures, "\n".join(lines))


def gpu_problems(own: list[Gpu], found: list[Gpu], processes: list[GpuProcess]) -> Iterator[str]:
    """What has to change before the GPUs can be used."""
    if not found:
        yield f"nvidia-smi finds no GPU: install the driver {MIN_DRIVER} or newer; start a container with its GPUs"
        return
    asked = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if "MIG-" in asked:
        of = ", ".join(sorted({gpu for uuid, gpu in mig_devices().items() if uuid in asked.split(",")}))
        yield f"CUDA_VISIBLE_DEVICES={asked} names MIG slices{' of GPU ' * bool(of)}{of}; {NO_SLICES}"
    elif not own:
        yield f"CUDA_VISIBLE_DEVICES={asked} names no GPU of this node"
    yield from _modes(own)
    major = found[0].driver.split(".")[0]
    if not major.isdigit() or int(major) < MIN_DRIVER:
        yield f"the driver is {found[0].driver}, CUDA 13 needs {MIN_DRIVER} or newer; there is no lock for CUDA 12"
    taken = [gpu for gpu in own if gpu.used > (1 - FREE_SHARE) * gpu.total]
    free = [gpu.index for gpu in found if gpu not in taken and gpu.used <= (1 - FREE_SHARE) * gpu.total]
    for gpu in taken:
        by = ", ".join(f"{one.name} (pid {one.pid})" for one in processes if one.uuid == gpu.uuid) or "somebody"
        yield f"GPU {gpu.index} has {gpu.used / 1024:.0f} GiB in use by {by}"
    if taken:
        yield f"CUDA_VISIBLE_DEVICES={','.join(free)} leaves the free ones" if free else "no GPU is free"


def _modes(own: list[Gpu]) -> Iterator[str]:
    """Modes of a GPU in which a run cannot use it as a whole, from several processes."""
    for gpu in own:
        if gpu.mig == "Enabled":
            yield f"GPU {gpu.index} is in MIG mode; {NO_SLICES} (its owner: nvidia-smi -i {gpu.index} -mig 0)"
        if gpu.compute_mode.startswith("Exclusive"):
            yield (
                f"GPU {gpu.index} is in compute mode {gpu.compute_mode}, in which one process at a time can use it, "
                f"and trainer and engine are processes that share it (its owner: nvidia-smi -i {gpu.index} -c DEFAULT)"
            )
        elif gpu.compute_mode == "Prohibited":
            yield f"GPU {gpu.index} is in compute mode Prohibited (its owner: nvidia-smi -i {gpu.index} -c DEFAULT)"


def host_problems(on_gpu: bool) -> Iterator[str]:
    """What makes NCCL, Ray or Triton fail later, in words that do not tell why."""
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total / GIB) < MIN_SHARED_GIB:
        yield f"/dev/shm has {size:.2f} GiB: mount it larger (docker: --shm-size=16g)"
    if on_gpu and not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "gcc", "clang")):
        yield "no C compiler, which Triton needs (Debian, Ubuntu: apt-get install build-essential)"
    if on_gpu and not (header := Path(sysconfig.get_path("include")) / "Python.h").is_file():
        package = "python{}.{}-dev".format(*sys.version_info[:2])
        yield f"{header} is missing, which Triton needs (Debian, Ubuntu: apt-get install {package})"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= limit < MIN_FILES:
        yield f"at most {limit} open files: ulimit -n {MIN_FILES}"


def host(scratch: Path) -> Iterator[str]:
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    yield f"- {platform.platform()}, Python {platform.python_version()} ({sys.executable})"
    yield f"- {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    yield f"- host memory {memory.total / GIB:.0f} GiB, {memory.available / GIB:.0f} GiB available"
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        yield f"- /dev/shm {usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB free"
    yield f"- disk of {scratch}: {shutil.disk_usage(scratch).free / GIB:.0f} GiB free"
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(TELLING)]
    yield f"- environment: {mask_text(', '.join(settings)) or 'nothing set that matters'}"


def gpu_table(found: list[Gpu], own: list[Gpu], processes: list[GpuProcess]) -> Iterator[str]:
    """All GPUs of the node, and who is on them."""
    if not found:
        return
    yield "| GPU | name | visible | in use, GiB | of | busy, % | MIG | compute mode | processes |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for gpu in found:
        on = ", ".join(f"{one.name} (pid {one.pid}, {one.used} MiB)" for one in processes if one.uuid == gpu.uuid)
        sizes = f"{gpu.used / 1024:.1f} | {gpu.total / 1024:.1f}"
        seen = "yes" if gpu in own else "no"
        modes = f"{gpu.utilization} | {gpu.mig} | {gpu.compute_mode}"
        yield f"| {gpu.index} | {gpu.name} | {seen} | {sizes} | {modes} | {on or '-'} |"
