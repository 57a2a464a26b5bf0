"""`.venv/bin/python -m search_r1.doctor`: check that this installation is complete. Leaves nothing running.

Every library is imported in a separate process, so that a crash is reported as well. `verl.trainer.preflight` checks
whether a particular run would start and fit.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.process.startup import usable_cores, usable_memory
from verl.process.storage import free_bytes
from verl.trainer.start_checks import machine
from verl.trainer.start_checks.finding import Finding, judge

GIB = 2**30
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED = 8 * GIB, 5 * GIB, GIB // 2
IMPORTS = {
    "transformers": "print(transformers.__version__)",
    "vllm": "from vllm.platforms import current_platform; print(vllm.__version__, 'on', current_platform.device_type)",
    "ray": "print(ray.__version__)",
    "faiss": "print(faiss.__version__)",
    "bm25s": "print(bm25s.__version__)",
    "pyarrow": "print(pyarrow.__version__)",
}
TORCH = """
import torch
print(torch.__version__, "with CUDA" if torch.backends.cuda.is_built() else "for CPU", flush=True)
for number in range(torch.cuda.device_count()):
    found = torch.cuda.get_device_properties(number)
    print(f"{found.name} with {found.total_memory / 2**30:.0f} GiB")
"""
SET_UP = "run bash scripts/setup.sh (with --gpu on an NVIDIA machine)"
DRIVER = "torch sees no GPU; run bash scripts/setup.sh --gpu, which says why"
IMPORT_S = 300


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 if all is well (or only warnings), else 1."""
    parser = argparse.ArgumentParser(prog="python -m search_r1.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.parse_args(argv)
    failed = False
    for finding in findings():
        print(finding, flush=True)
        failed |= finding.level == "FAIL"
    print("something is missing: see the lines with FAIL" if failed else "everything is installed")
    return int(failed)


def findings() -> Iterator[Finding]:
    """All findings; the slowest checks come last."""
    yield from machine.check_versions(machine.declared(), platform.python_version(), machine.installed())
    yield from _machine()
    yield from torch_and_gpus()
    for name, code in IMPORTS.items():
        yield imported(name, code)


def imported(name: str, code: str) -> Finding:
    """Whether a library can be imported, and what `code` then prints about it."""
    ran = _run(f"import {name}\n{code}")
    return judge(ran.returncode == 0, f"import {name}", _last_words(ran), SET_UP)


def torch_and_gpus(code: str = TORCH) -> Iterator[Finding]:
    """The findings on torch and on GPUs, from one process, since torch takes seconds to import.

    `code` prints a line on torch, then one per GPU.
    """
    ran = _run(code)
    version, *gpus = ran.stdout.splitlines() or [""]
    yield judge(version != "", "import torch", version or _last_words(ran), SET_UP)
    if version:
        yield _gpus(gpus) if ran.returncode == 0 else Finding("warn", "GPUs", _last_words(ran), DRIVER)


def _last_words(ran: subprocess.CompletedProcess[str]) -> str:
    if ran.returncode < 0:
        return f"the process ended by signal {-ran.returncode}"
    last = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().rpartition("\n")[2]
    return last or "no error message"


def _machine() -> Iterator[Finding]:
    cores, memory = usable_cores(), usable_memory()
    yield judge(cores >= 2, "cores", str(cores), "at least two are recommended", "warn")
    yield judge(memory >= LEAST_MEMORY, "memory", f"{memory / GIB:.0f} GiB", "at least 16 GiB are recommended", "warn")
    yield machine.check_open_files(machine.open_files_limit())
    free = free_bytes(Path.cwd())
    yield judge(free >= LEAST_DISK, "disk", f"{free / GIB:.0f} GiB free in {Path.cwd()}", "free some space", "warn")
    shared = Path("/dev/shm")
    if shared.is_dir():
        found = shutil.disk_usage(shared).free
        todo = "in a container: docker run --shm-size=8g"
        yield judge(found >= LEAST_SHARED, "/dev/shm", f"{found / GIB:.1f} GiB free", todo, "warn")
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    yield judge(compiler is not None, "C compiler", compiler or "none", "apt-get install build-essential", "warn")


def _gpus(found: list[str]) -> Finding:
    if found:
        return Finding("ok", "GPUs", f"{len(found)}: {', '.join(dict.fromkeys(found))}")
    driver = shutil.which("nvidia-smi")
    seen = "none" if driver is None else f"none, although {driver} exists"
    return judge(driver is None, "GPUs", seen, DRIVER, "warn")


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)


if __name__ == "__main__":
    sys.exit(main())
