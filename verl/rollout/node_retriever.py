"""A retriever on each node that samples (`retriever.placement=per_node`), which starts and ends with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from verl.config import Config
from verl.errors import EnvironmentUnavailable
from verl.parent import end_with_parent
from verl.single_controller import ResourcePool
from verl.working_dir import enter_working_dir

LOOK_S = 0.2
GRACE_S = 10.0  # for a retriever that is told to end
LAST_WORDS = 2000  # bytes of its log in an error


class NodeRetriever:
    """Starts `command` in the folder that the run was started in, on the node that it is on itself, and ends with it.

    `url` is the retriever's, as its node reaches it. What it prints is in a file of that node.
    """

    def __init__(self, command: str, url: str) -> None:
        enter_working_dir()
        parts = urlsplit(url)
        self._command, self._host = command, socket.gethostname()
        self._address = (parts.hostname or "", parts.port or 80)
        file, name = tempfile.mkstemp(prefix="retriever-", suffix=".log")
        self._log = Path(name)
        self._process: subprocess.Popen[bytes] | None = None
        with open(file, "wb") as output:
            if not self._listens():
                self._process = subprocess.Popen(
                    ["bash", "-c", command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )

    def wait_until_it_listens(self, timeout_s: float) -> str:
        """The path of its log. Raises EnvironmentUnavailable."""
        if self._process is None:
            raise EnvironmentUnavailable(
                f"on host {self._host} something listens at {self._address[0]}:{self._address[1]} already, where "
                "retriever.placement=per_node starts a retriever of the run's own: end it, or set "
                "retriever.placement=apart to use it"
            )
        deadline = time.monotonic() + timeout_s
        while not self._listens():
            if (status := self._process.poll()) is not None:
                raise EnvironmentUnavailable(
                    f"on host {self._host} retriever.launch ({self._command}) ended with status {status}; the end of "
                    f"its log {self._log}:\n{self._last_words()}"
                )
            if time.monotonic() > deadline:
                raise EnvironmentUnavailable(
                    f"on host {self._host} the retriever ({self._command}) does not listen at {self._address[0]}:"
                    f"{self._address[1]} after {timeout_s:.0f} s (trainer.step_timeout_s); its log is {self._log}"
                )
            time.sleep(LOOK_S)
        return str(self._log)

    def end(self) -> None:
        """It and all that it has started."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                return

    def _listens(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=1.0).close()
        except OSError:
            return False
        return True

    def _last_words(self) -> str:
        return self._log.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()


class NodeRetrievers:
    """Those of a run, by the address of their node; none unless they are asked for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._started: dict[str, tuple[Any, Any]] = {}  # its actor, and a reference to the path of its log

    def ready_at(self, pool: ResourcePool, node: int) -> Any:
        """A reference that is there when a node of `pool` has its retriever; None where the run has none of its own."""
        retriever = self._config.retriever
        if retriever.placement != "per_node" or retriever.launch is None:
            return None
        address = pool.nodes[node].address if pool.nodes else ""
        if address not in self._started:
            options = pool.plain_options(node)
            actor = ray.remote(NodeRetriever).options(**options).remote(retriever.launch, retriever.url)
            ready = actor.wait_until_it_listens.remote(self._config.trainer.step_timeout_s)
            self._started[address] = (actor, ready)
        return self._started[address][1]

    def leave(self, address: str) -> None:
        """Forget that of a node that is lost, or not used any more."""
        if address in self._started:
            self._end([self._started.pop(address)])

    def close(self) -> None:
        started, self._started = list(self._started.values()), {}
        self._end(started)

    def _end(self, started: list[tuple[Any, Any]]) -> None:
        """One that does not listen yet has no time to be asked: it is killed with its actor."""
        with contextlib.suppress(Exception):  # a node is lost
            listening, _ = ray.wait([ready for _, ready in started], num_returns=len(started), timeout=0)
            ending = [actor.end.remote() for actor, ready in started if ready in listening]
            ray.wait(ending, num_returns=len(ending), timeout=3 * GRACE_S)
        for actor, _ in started:
            with contextlib.suppress(Exception):
                ray.kill(actor)
