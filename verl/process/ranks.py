"""The processes that a program starts: the ranks of a warm start, which end together, with one account of why; and the
actors of a run, perhaps on another node.

An actor enters the run's folder, has the driver's variables for its libraries, and ends with the process that started
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from program_end import NEEDS_A_PERSON
from url_text import SECRET_KEY
from verl.process.startup import rank_threads

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


RENDEZVOUS = "VERL_RENDEZVOUS"
"""Where the ranks meet, for torch's `init_process_group`: a file, so that no port can be taken."""
END_S = 20.0  # how long ranks may take to end after SIGTERM
SAME_ERROR_S = 5.0  # within which every rank has found an error of the settings or the input
LOOK_S = 0.1


def is_rank() -> bool:
    """Whether this process is a rank of `run_ranks`, which tells the user how the ranks ended."""
    return RENDEZVOUS in os.environ


def run_ranks(command: Sequence[str], num_ranks: int) -> int:
    """Run `num_ranks` processes of `command`, with the variables of torchrun; returns the exit status.

    The first rank has this process's standard error. What another rank writes there is shown only if that rank is the
    first to fail. A KeyboardInterrupt ends all ranks, which should say nothing of it (`is_rank`), and is raised.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, contextlib.ExitStack() as files:
        folder = Path(name)
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(num_ranks):
                stderr = files.enter_context((folder / f"{rank}").open("wb")) if rank else None
                ranks.append(_start(command, rank, num_ranks, folder, stderr))
            # Ranks wait for one another, so the first one that fails ends all.
            failed = _wait_for_first_failure(ranks)
        finally:
            _end(ranks)
        if failed is None:
            return 0
        _tell(failed, ranks, folder)
        # The status of a rank that a signal has ended is negative, and no exit status.
        status = ranks[failed].returncode
        return status if status > 0 else 1


def _start(
    command: Sequence[str], rank: int, num_ranks: int, folder: Path, stderr: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start a rank in a process group of its own: a Ctrl-C comes here alone, and is passed on once."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        RENDEZVOUS: f"file://{folder / 'store'}",
    }
    # The ranks share the cores, unless the user has set this variable.
    threads = {"OMP_NUM_THREADS": str(rank_threads(num_ranks))}
    return subprocess.Popen(
        command,
        env={**threads, **os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        process_group=0,
        preexec_fn=end_with_parent,
    )


def _wait_for_first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all ranks have ended well, or one has not; returns that one."""
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = next((rank for rank, status in enumerate(statuses) if status), None)
        if failed is not None and statuses[failed] == NEEDS_A_PERSON:
            with contextlib.suppress(subprocess.TimeoutExpired):
                ranks[0].wait(SAME_ERROR_S)
        if failed is not None or None not in statuses:
            return failed
        time.sleep(LOOK_S)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: with SIGTERM, and those that take too long with SIGKILL."""
    for rank in _running(ranks):
        rank.terminate()
    deadline = time.monotonic() + END_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
    for rank in _running(ranks):
        rank.kill()
        rank.wait()


def _running(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[subprocess.Popen[bytes]]:
    return (rank for rank in ranks if rank.poll() is None)


def _tell(failed: int, ranks: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Show why a rank other than the first has failed; an error that the first has found, too, is told once."""
    status = ranks[failed].returncode
    if failed and not status == ranks[0].returncode == NEEDS_A_PERSON:
        sys.stderr.write((folder / f"{failed}").read_text(encoding="utf-8", errors="replace"))
    if status < 0:
        print(f"error: worker {failed} was ended by {signal.Signals(-status).name}", file=sys.stderr)
