"""The heap of a process that works on tensors of ever new sizes."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Give the pages that glibc keeps for later back to the system; elsewhere does nothing.

    Such tensors leave holes between what stays, so that the heap on CPU grows with the steps of a run.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
