"""A process that ends with the one that started it, however that ends."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; on Linux alone.

    It stays so when the process becomes another program (exec), so that it can be set between fork and exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
