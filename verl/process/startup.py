"""How a process starts and ends: what it logs, how many CPU threads it computes with, how its heap is managed, and a
quick end.

    log_to_stderr()
    with phase("starting Ray"):
        ray.init(...)

A phase logs `[  3 s] starting Ray` to standard error, with the seconds since the process began, and further lines while
it lasts; from libraries comes only what a user can act on. Standard output stays free for the program's own output.

Threads, unless `num_threads` says otherwise: processes that work at the same time share the cores; roles that take
turns have all of them in turn.

Heap, where glibc manages it: memory that goes back to the system has to be mapped and cleared, page by page, when it is
used again, which is a tenth of the time of a small model's update. Memory that never goes back adds up, since tensors
of ever new sizes leave holes between what stays.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import NoReturn, TextIO

import psutil

log = logging.getLogger(__name__)

BEAT_S = 10.0
DATED = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PLAIN = "%(message)s"

ENGINE_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_LOGS": "-torch._library.triton",  # a warning about a missing Triton on machines that need none
}
"""Environment variables that keep vLLM and torch quiet, here and in processes that start here. Errors still appear."""

CPU_ENGINE_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM's CPU kernels tell which NUMA node their memory is on
}
"""Further ones for an engine on CPU alone: on GPUs the warnings of torch's C++ code are about NCCL."""

TALKATIVE = ("bm25s", "faiss", "httpx", "httpx2", "matplotlib", "vllm")
"""Libraries whose news below a warning are of no use to anybody: each request, which CPU they were built for, that
there is no Triton (vLLM, before it sets up a log of its own)."""


def log_to_stderr(form: str = DATED) -> None:
    """Lines of INFO and above go to standard error, and libraries are quiet. To be called before these are imported."""
    handler = _StderrOfNow()
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.split(".")[0] not in TALKATIVE)
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S", handlers=[handler])
    before_libraries()


class _StderrOfNow(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to whatever `sys.stderr` is now: a progress bar takes its place, so that lines go above."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...


def before_libraries() -> None:
    """Before torch, transformers or vLLM is imported: keep messages out of the output that no user can act on, and
    Python's collector from looking at thousands of modules again and again, which is a fifth of the import.

    Settings of the user's environment stay.
    """
    for name, value in ENGINE_VARIABLES.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def tell(text: str) -> None:
    """Log a line with the seconds since this process began."""
    log.info("[%3.0f s] %s", time.time() - psutil.Process().create_time(), text)


@contextmanager
def phase(text: str) -> Iterator[None]:
    """Log a line now and, while the phase lasts, another after every ten seconds, or every minute of a long one."""
    tell(text)
    with beside(partial(_beat, text)):
        yield


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Do `work` in a thread while the block lasts. The end of the block sets its event, then waits for it to return."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(text: str, over: threading.Event) -> None:
    started, beats = time.monotonic(), 0
    while not over.wait(BEAT_S):
        beats += 1
        if beats < 6 or beats % 6 == 0:
            tell(f"{text}: {time.monotonic() - started:.0f} s so far")


CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may keep busy: by its affinity, and by the quota of its container or job (cgroup v2 or
    v1).

    A quota of two and a half cores counts as two; at least 1.
    """
    limits = [float(len(os.sched_getaffinity(0)))]
    for folder, is_v1 in (*_groups("cpu", cgroups, own), (cgroups, False), (cgroups / "cpu", True)):
        quota = _quota_v1(folder) if is_v1 else _quota_v2(folder)
        limits += [] if quota is None else [quota]
    return max(1, int(min(limits)))


def rank_threads(ranks_at_once: int) -> int:
    """CPU threads of each of the ranks of a node that work at the same time."""
    return max(1, usable_cores() // ranks_at_once)


def engine_threads(engines_at_once: int = 1) -> int:
    """CPU threads of each engine's model: one core stays free for the processes that own the engines."""
    return max(1, (usable_cores() - 1) // engines_at_once)


def usable_memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Bytes of memory that this process and its like may use: the machine's, or the limit of its container or of its
    job on a cluster (cgroup v2 or v1) where that is less.
    """
    limits = [psutil.virtual_memory().total]
    for folder, is_v1 in _groups("memory", cgroups, own):
        file = folder / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        limits += [int(word) for word in _words(file) if word != "max"]
    return min(limits)


def _groups(controller: str, cgroups: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of the control groups that limit this process, and whether they are of cgroup v1."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)  # of v1; one line without controllers is that of v2
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        # The groups around it limit it, too. In a container its own path may be the host's: only the root is there.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder, bool(controllers)
            if folder == root:
                break


def _quota_v2(group: Path) -> float | None:
    """Cores by the quota of cgroup v2, in cpu.max: `QUOTA PERIOD` in microseconds, or `max PERIOD` for no quota."""
    words = _words(group / "cpu.max")
    return None if len(words) != 2 or words[0] == "max" else int(words[0]) / int(words[1])


def _quota_v1(group: Path) -> float | None:
    """Cores by the quota of cgroup v1, where -1 means none."""
    quota, period = (_words(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if not (quota and period) or int(quota[0]) <= 0 else int(quota[0]) / int(period[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


KEPT_BYTES = 512 * 2**20
LARGE_BYTES = 32 * 2**20  # the largest that glibc allows
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
RETURN_EVERY_S = 15.0  # between the steps of a run
COLLECTOR_THRESHOLDS = (10_000, 20, 50)  # 700, 10, 10 by default

_returned_at = -math.inf


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES at the end of the heap, and all tensors but those above LARGE_BYTES in it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def return_free_memory(every_s: float = 0.0) -> None:
    """Give the pages that glibc keeps back to the system, unless that was done in the last `every_s` seconds."""
    global _returned_at
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim") and time.monotonic() >= _returned_at + every_s:
        libc.malloc_trim(0)
        _returned_at = time.monotonic()


def collect_rarely() -> None:
    """Let Python's collector leave alone what exists, and look for garbage less often from now on.

    Hundreds of open requests are objects that each collection looks at, and none of them is garbage: with the default
    thresholds this takes a quarter of a rollout worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def leave(status: int) -> NoReturn:
    """End the program with `status`: as sys.exit does, but without clearing away its modules.

    Threads are waited for and exit functions are called. What is left out takes a second or two with the modules of
    torch, vLLM and Ray, and frees nothing that the end of a process does not free. To be called as the last line of a
    program; where something else runs it as a module (a notebook, a profiler), this is sys.exit.
    """
    callers = [frame.f_code.co_name for frame, _ in walk_stack(sys._getframe(1))]
    if not {*callers} <= {"<module>", *_PYTHON_M}:
        sys.exit(status)
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


_PYTHON_M = ("_run_code", "_run_module_as_main")  # the functions that run the module of `python -m`
