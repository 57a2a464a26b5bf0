"""What a process that the run starts does first: it enters the run's folder, and it ends with the process that started
it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
WORKING_DIR = "VERL_WORKING_DIR"


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; on Linux alone.

    It stays so when the process becomes another program (exec), so that it can be set between fork and exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def working_dir_variable() -> dict[str, str]:
    """The environment variable for a worker that calls `enter_working_dir`."""
    return {WORKING_DIR: os.getcwd()}


def enter_working_dir() -> None:
    """Enter the folder that the run was started in, where relative paths begin: Ray starts a worker where its node's
    Ray was started. Raises FileNotFoundError.
    """
    if folder := os.environ.get(WORKING_DIR):
        os.chdir(folder)
