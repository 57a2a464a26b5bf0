"""Programs run side by side, and a server kept while they run. None of them outlives the block that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {
    # One thread a role, and waiting threads that sleep: the roles share the cores.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Every training starts a Ray of its own, whatever else runs on the machine.
    "RAY_ADDRESS": "local",
    "RAY_DASHBOARD_ADDRESS": "",
}
SECONDS_TO_END = 60.0
SECONDS_TO_START = 120.0
_without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # to this machine


@dataclass(frozen=True)
class Job:
    """A program to run; its output goes to the file `log`."""

    name: str
    command: Sequence[str]
    log: Path


def run_all(jobs: Sequence[Job], at_once: int) -> list[Job]:
    """Run the jobs in order, a number of them at a time; returns those that failed.

    Prints a line for each that ended. On an exception (Ctrl-C, say) those that run are ended first.
    """
    waiting, failed = deque(jobs), []
    running: list[tuple[Job, subprocess.Popen[bytes], float]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                running.append((job, _start(job.command, job.log), time.monotonic()))
            time.sleep(0.2)
            for job, process, started in [entry for entry in running if entry[1].poll() is not None]:
                running.remove((job, process, started))
                seconds = f"{time.monotonic() - started:.0f} s"
                if process.returncode:
                    failed.append(job)
                    print(f"{job.name}: FAILED after {seconds}, see {job.log}", flush=True)
                else:
                    print(f"{job.name}: done in {seconds}", flush=True)
    finally:
        _end([process for _, process, _ in running])
    return failed


@contextmanager
def retrieval_server(corpus: Path, log: Path) -> Iterator[str]:
    """Yields the URL of a server for the passages in `corpus`, on a free port. Raises RuntimeError if none starts."""
    with socket.socket() as held:  # for a server that reuses addresses the port is free, for others it is taken
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        variables = {"CORPUS_PATH": str(corpus), "PORT": str(port)}
        with program(["bash", str(ROOT / "retrieval_launch.sh")], log, variables) as process:
            _wait_until_healthy(process, f"http://127.0.0.1:{port}/healthz", log)
            yield f"http://127.0.0.1:{port}/retrieve"


@contextmanager
def program(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One that runs until it ends by itself or the block is left, with everything that it has started."""
    process = _start(command, log, variables, cwd)
    try:
        yield process
    finally:
        _end([process])


def _start(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that a Ctrl-C reaches it once, by `_end`, and it can clean up undisturbed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | VARIABLES | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):  # what it has left behind in its session, if anything
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with _without_proxy.open(url, timeout=5):  # nosec B310 # of the server that was started here
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the retrieval server did not start, see {log}")
