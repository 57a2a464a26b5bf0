"""The retriever of a training run: what the run's folder keeps of it, and starting it again when it has ended.

A run on the machine of its retriever saves the command that started it, as the operating system shows it. `--run` then
works when the server has ended, too: it is started for as long as it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil

from search_r1.http.client import addresses_of, is_loopback
from search_r1.llm_agent.command_line import chooses
from url_text import MASK, SECRET_KEY, mask_text
from verl.agent.tools.loading import uses_retriever
from verl.config import Config, RetrieverConfig
from verl.errors import EnvironmentUnavailable
from verl.process.ranks import end_with_parent
from verl.process.startup import phase, tell
from verl.run.run_folder import RETRIEVER_FILE

ROOT = Path(__file__).resolve().parents[2]
END_S = 15.0  # how long a stopping server may finish what it answers
LOOK_S = 0.1
SHOWN_LINES = 5  # of the log of a server that does not start


class Launch(NamedTuple):
    """How a retriever was started: its address, its command line, and the folder it was started in."""

    url: str
    command: list[str]
    folder: str


def launch_text(retriever: RetrieverConfig) -> str | None:
    """The contents of `RETRIEVER_FILE`: the launch of the first server of `retriever.url` that runs on this machine.

    None if no process of this user on this machine listens there, or if its command line holds a secret.
    """
    for url in filter(is_loopback, addresses_of(retriever.url)):
        launch = _launch_of(url)
        if launch is not None:
            return json.dumps(launch._asdict(), indent=1) + "\n"
    return None


@contextlib.contextmanager
def retriever_of_run(args: argparse.Namespace, config: Config) -> Iterator[None]:
    """Within the block the retriever of `--run` answers, if it can be started here; it is left alone if it runs.

    Sets `config.retriever.url` to the server that was started. Raises `EnvironmentUnavailable` if it ends at once.
    """
    retriever = config.retriever
    launch = None
    chosen = retriever.engine is not None or chooses(args, "retriever_url")
    if args.run is not None and not chosen and uses_retriever(config):
        launch = saved_launch(args.run.expanduser(), retriever)
    if launch is None or any(map(_listens, addresses_of(retriever.url))):
        yield
        return
    with started(launch):
        retriever.placement, retriever.url = "apart", launch.url
        yield


def saved_launch(run_dir: Path, retriever: RetrieverConfig) -> Launch | None:
    """The launch that the run saved, or that of `retriever.launch`; None if there is neither."""
    if retriever.launch is not None:
        return Launch(addresses_of(retriever.url)[0], ["bash", "-c", retriever.launch], os.getcwd())
    try:
        found: dict[str, Any] = json.loads((run_dir / RETRIEVER_FILE).read_text(encoding="utf-8"))
        return Launch(str(found["url"]), [str(word) for word in found["command"]], str(found["folder"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def started(launch: Launch) -> Iterator[None]:
    """Start the server, wait until it listens, and end it with the block. Raises `EnvironmentUnavailable`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    tell(f"no retriever answers at {launch.url}: it is started again as in training, until this command ends")
    # A process of its own, whose output is shown only if it ends before it listens.
    with tempfile.TemporaryFile() as log:
        try:
            server = subprocess.Popen(
                launch.command,
                cwd=launch.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # a Ctrl-C is for this command, which then ends the server
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise EnvironmentUnavailable(
                f"the run's retriever cannot be started in {launch.folder}: {error}"
            ) from error
        try:
            with phase("loading the retriever's corpus and index"):
                while not _listens(launch.url):
                    if server.poll() is not None:
                        raise EnvironmentUnavailable(_why(launch, server.returncode, log))
                    time.sleep(LOOK_S)
            yield
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(END_S)
            server.kill()
            server.wait()


def _why(launch: Launch, status: int, log: Any) -> str:
    log.seek(0)
    last = log.read().decode(errors="replace").strip().splitlines()[-SHOWN_LINES:]
    words = " ".join(launch.command)
    return (
        f"the run's retriever ended with status {status}: {'; '.join(last)}. It was started in {launch.folder} by: "
        f"{words}. Start it yourself, and give its address: --retriever_url http://127.0.0.1:8000/retrieve"
    )


def _launch_of(url: str) -> Launch | None:
    """The launch of the process that listens at `url` on this machine."""
    port = urlsplit(url).port or 80
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or connection.pid is None:
                continue
            process = psutil.Process(connection.pid)
            command = process.cmdline()
            if command and not _holds_secret(command):
                return Launch(url, [_program(process, command[0]), *command[1:]], process.cwd())
    return None


def _program(process: psutil.Process, name: str) -> str:
    """The program by its path: Python's own, since a virtual environment is found by the path that it is called by."""
    if Path(name).is_absolute() or os.sep not in name:
        return name
    return str(Path(process.cwd()) / name)


def _holds_secret(command: list[str]) -> bool:
    flags = (word.partition("=")[0].lstrip("-") for word in command if word.startswith("-"))
    return any(map(SECRET_KEY.search, flags)) or MASK in mask_text(" ".join(command)) or MASK in command


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=2).close()
    except OSError:
        return False
    return True
