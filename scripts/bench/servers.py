"""Servers for the retrieval benchmarks: started on given cores, watched for memory, stopped at the end."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_START_S, _STOP_S, _SAMPLE_S = 900.0, 30.0, 0.2
_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
}


@dataclass
class Server:
    """A running server; `rss_mib` holds samples of its resident memory, in MiB, since it was ready."""

    url: str
    process: subprocess.Popen[bytes]
    rss_mib: list[float] = field(default_factory=list)

    @property
    def growth_mib(self) -> float:
        """From the first sample to the highest."""
        return max(self.rss_mib) - self.rss_mib[0]

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU so far."""
        return cpu_s(self.process.pid)


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """What to serve, and what to ask: `--corpus_path --index_path --retriever_name --retriever_model --questions`."""
    parser.add_argument("--corpus_path", required=True)
    parser.add_argument("--index_path", required=True)
    parser.add_argument("--retriever_name", default="minilm")
    parser.add_argument("--retriever_model")
    parser.add_argument("--questions", type=Path, nargs="+", required=True, help="JSON lines with a field `question`")


def retrieval_command(arguments: argparse.Namespace) -> list[str]:
    """The retrieval server over what `add_index_arguments` read, for `server`."""
    command = ["-m", "search_r1.search.retrieval_server", "--corpus_path", arguments.corpus_path]
    command += ["--index_path", arguments.index_path, "--retriever_name", arguments.retriever_name]
    return command + (["--retriever_model", arguments.retriever_model] if arguments.retriever_model else [])


@contextmanager
def server(command: Sequence[str], cores: Sequence[int], log: Path) -> Iterator[Server]:
    """`python {command} --port PORT` on `cores`, until the block ends. Raises `RuntimeError` when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(len(cores))}
    pinned = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, *command, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(pinned, env=environment, stdout=output, stderr=subprocess.STDOUT)
    running = Server(f"http://127.0.0.1:{port}", process)
    try:
        _wait(running, log)
        threading.Thread(target=_watch, args=(running,), daemon=True).start()
        time.sleep(2 * _SAMPLE_S)
        yield running
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _wait(running: Server, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if running.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{running.url}/readyz", timeout=1):  # nosec B310 # started above
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _watch(running: Server) -> None:
    while running.process.poll() is None:
        try:
            running.rss_mib.append(rss_mib(running.process.pid))
        except (OSError, StopIteration):
            return
        time.sleep(_SAMPLE_S)


def rss_mib(pid: int) -> float:
    """Resident memory of a process, mapped files included, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def process_tree(pid: int) -> list[int]:
    """A process and all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in process_tree(int(child)))]


def proportional_mib(pid: int) -> float:
    """Memory of a process in MiB, pages that it shares with others by its share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
