"""The heap of a process that works on tensors of ever new sizes, and Python's collector in one with many live objects.

What concerns the heap is done where glibc manages it, elsewhere nothing.

Memory that goes back to the system has to be mapped and cleared, page by page, when it is used again: a tenth of the
time of a small model's update. Memory that never goes back adds up, since such tensors leave holes between what stays.
"""

from __future__ import annotations

import ctypes
import gc
import math
import time

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
    """Let Python's collector leave alone what exists, and look for garbage less often.

    Hundreds of open requests are objects that each collection looks at, and none of them is garbage: with the default
    thresholds this takes a quarter of a rollout worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
