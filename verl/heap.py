"""The heap of a process that works on tensors of ever new sizes, and Python's collector in one with many live objects.

What concerns the heap is done where glibc manages it, elsewhere nothing.

Memory that goes back to the system has to be mapped and cleared, page by page, when it is used again: a tenth of the
time of a small model's update. Memory that never goes back adds up, since such tensors leave holes between what stays.
"""

from __future__ import annotations

import ctypes
import gc

import psutil

KEPT_BYTES = 512 * 2**20
LARGE_BYTES = 32 * 2**20  # the largest that glibc allows
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
RETURN_EVERY = 8  # steps
COLLECTOR_THRESHOLDS = (10_000, 20, 50)  # 700, 10, 10 by default

_resident_bytes, _steps = 0, 0  # right after the last return, and since then


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES at the end of the heap, and all tensors but those above LARGE_BYTES in it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def return_surplus_memory() -> None:
    """To be called in each step: `return_free_memory` after RETURN_EVERY steps, or when it has grown by KEPT_BYTES."""
    global _steps
    _steps += 1
    if _steps >= RETURN_EVERY or psutil.Process().memory_info().rss > _resident_bytes + KEPT_BYTES:
        return_free_memory()


def return_free_memory() -> None:
    """Give the pages that glibc keeps for later back to the system."""
    global _resident_bytes, _steps
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    _resident_bytes, _steps = psutil.Process().memory_info().rss, 0


def collect_rarely() -> None:
    """Let Python's collector leave alone what exists, and look for garbage less often.

    Hundreds of open requests are objects that each collection looks at, and none of them is garbage: with the default
    thresholds this takes a quarter of a rollout worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
