"""A process that the run starts, perhaps on another node: it enters the run's folder, has the driver's variables for
its libraries, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys

from verl.process.secrets import SECRET_KEY

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
WORKING_DIR = "VERL_WORKING_DIR"
PASSED_ON = re.compile(r"(NCCL|GLOO|UCX|FI|VLLM|TORCH|PYTORCH|HF|TRANSFORMERS)_")
OF_ONE_NODE = ("VLLM_HOST_IP", "VLLM_RPC_BASE_PATH")


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; on Linux alone.

    It stays so when the process becomes another program (exec), so that it can be set between fork and exec.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def variables_of_driver() -> dict[str, str]:
    """Environment variables for a worker: the folder for `enter_working_dir`, and what the user has set here for the
    libraries (docs/multinode.md lists it), which a node's Ray, started by somebody else, does not have. No secrets: Ray
    shows the variables of its workers to all who see its dashboard.
    """
    for_libraries = {
        name: value
        for name, value in os.environ.items()
        if PASSED_ON.match(name) and name not in OF_ONE_NODE and not SECRET_KEY.search(name)
    }
    return {WORKING_DIR: os.getcwd()} | for_libraries


def enter_working_dir() -> None:
    """Enter the folder that the run was started in, where relative paths begin: Ray starts a worker where its node's
    Ray was started. Raises FileNotFoundError.
    """
    if folder := os.environ.get(WORKING_DIR):
        os.chdir(folder)
