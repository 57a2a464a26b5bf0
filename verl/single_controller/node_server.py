"""A server that a run starts on one of its nodes and ends with the run: a retriever, or a reward's server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray

from verl.errors import VerlError
from verl.process.ranks import enter_working_dir

LOOK_S = 0.2
GRACE_S = 10.0  # for a server to end after SIGTERM
LOG_BYTES = 2000  # of the end of its log, in an error
# A process beside the server that kills its group when the actor is gone, however it ended. It reads the number of the
# group, and then the end of its input; or another line, by which the actor dismisses it. It is there before the server,
# and no child of the actor, whose children Ray may kill first. $0 is the server's log, for who looks at the processes.
GUARD = '{ read -r group && { read -r || kill -KILL -- "-$group"; }; } <&0 &'
# The server tells the guard its group itself, before the command runs: the actor may be killed at any moment.
SERVER = 'guard=$1; echo $$ >&"$guard"; exec bash -c "$0" {guard}>&-'


@dataclass(frozen=True)
class Launch:
    """A server to start: `command` for bash, which listens at `host`:`port`, as seen from its node.

    `error` is the class of errors. They call the server `name` and the command's config key `setting`, and say what to
    do if something listens there `already`, or the command does not listen in time (`unheard`).
    """

    command: str
    host: str
    port: int
    name: str
    setting: str
    already: str
    unheard: str
    error: type[VerlError]
    variables: dict[str, str] = field(default_factory=dict)  # environment variables


class NodeServer:
    """Starts the server on this actor's node, in the folder that the run was started in, and ends it with the actor.

    The server sees the actor's GPUs. Its output goes to a file on that node.
    """

    def __init__(self, launch: Launch) -> None:
        enter_working_dir()
        self._launch, self._on = launch, socket.gethostname()
        file, name = tempfile.mkstemp(prefix=f"{launch.name.replace(' ', '-')}-", suffix=".log")
        self._log = Path(name)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False
        self._guarding = -1  # the end of a pipe to the guard, while there is one
        with open(file, "wb") as output:
            # If something listens there already, nothing is started, and `wait_until_it_listens` raises the error. A
            # session of its own makes one process group, by which `end` reaches all that the command has started.
            if not self._listens():
                self._guard()
                variables = os.environ | launch.variables
                # Ray gives one thread to an actor that asks for no cores, unless somebody has said otherwise.
                if "OMP_NUM_THREADS" not in psutil.Process().environ():  # as it was when this process began
                    variables.pop("OMP_NUM_THREADS", None)
                self._process = subprocess.Popen(
                    ["bash", "-c", SERVER, launch.command, str(self._guarding)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env=variables,
                    pass_fds=(self._guarding,),
                )

    def wait_until_it_listens(self, timeout_s: float) -> str:
        """Wait until it listens or is ended, and return the path of its log. Raises the launch's `error`."""
        launch, host = self._launch, self._launch.host
        where = f"[{host}]:{launch.port}" if ":" in host else f"{host}:{launch.port}"
        if self._process is None:
            raise launch.error(f"on host {self._on} something listens at {where} already, {launch.already}")
        deadline = time.monotonic() + timeout_s
        # The run may call `end` meanwhile, in another thread: that the server ends then is no error.
        while not (self._is_ending or self._listens()):
            if (status := self._process.poll()) is not None and not self._is_ending:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # what it has left in the background
                self._dismiss_guard()
                end_of_log = self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
                raise launch.error(
                    f"on host {self._on} {launch.setting} ({launch.command}) ended with status {status}; the end of "
                    f"its log {self._log}:\n{end_of_log}"
                )
            if time.monotonic() > deadline:
                raise launch.error(
                    f"on host {self._on} the {launch.name} ({launch.command}) does not listen at {where} after "
                    f"{timeout_s:.0f} s (trainer.step_timeout_s){launch.unheard}; its log is {self._log}"
                )
            time.sleep(LOOK_S)
        return str(self._log)

    def end(self) -> None:
        """End the server and all processes that it started, which are its group: bash may end before they do."""
        # While bash is not waited for, no other group can have its number.
        if self._process is None or self._process.returncode is not None:
            return
        self._is_ending = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            deadline = time.monotonic() + GRACE_S
            while (runs := _runs(self._process.pid)) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            if not runs:
                break
        self._dismiss_guard()
        self._process.poll()

    def _guard(self) -> None:
        """Let the server's group end with this process, also when it is killed: its parts are no children of it."""
        heard, self._guarding = os.pipe()
        subprocess.run(
            ["bash", "-c", GUARD, str(self._log)],
            stdin=heard,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )
        os.close(heard)

    def _dismiss_guard(self) -> None:
        """End the guard: the number of a group that has ended may be given to another one."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._guarding, b"\n")
        os.close(self._guarding)

    def _listens(self) -> bool:
        try:
            socket.create_connection((self._launch.host, self._launch.port), timeout=1.0).close()
        except OSError:
            return False
        return True


def _runs(group: int) -> bool:
    """Whether any process of the group runs. A zombie does not; in a container it may stay for ever."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@dataclass(frozen=True)
class StartedServer:
    """The driver's view of a server. `ready`: a reference to the path of its log, available once it listens."""

    actor: Any
    ready: Any


def start_server(launch: Launch, options: dict[str, Any], timeout_s: float) -> StartedServer:
    """Start a server with `options` of a Ray actor, which say where."""
    # A second call at once, so that a server can be ended while it is waited for.
    actor = ray.remote(NodeServer).options(**options, max_concurrency=2).remote(launch)
    return StartedServer(actor, actor.wait_until_it_listens.remote(timeout_s))


def end_servers(servers: Sequence[StartedServer]) -> None:
    """End the servers, also those that do not listen yet."""
    with contextlib.suppress(Exception):  # a node is lost
        ending = [one.actor.end.remote() for one in servers]
        ray.wait(ending, num_returns=len(ending), timeout=3 * GRACE_S)
    for one in servers:
        with contextlib.suppress(Exception):
            ray.kill(one.actor)
