"""The run's Ray: the cluster that RAY_ADDRESS names, or one that is started on this machine.

Ray itself would join whatever cluster was started last on this machine, by whomever.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import socket
import sys
from pathlib import Path
from traceback import format_exception
from typing import Any
from urllib.parse import urlsplit

import ray

from verl.errors import WorkerError
from verl.process.storage import MAX_SOCKET_PATH

log = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
CLIENT_PORT = 10001  # of ray:// addresses
REACH_S = 10.0
RAY_SETTINGS = {
    # On one machine a lost control store never comes back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # Prestarted processes would not be used: each role has its own environment variables.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's default, 15, leaves trainers and engines a thirtieth of a core beside any other busy process, such as a
    # retrieval server.
    "RAY_worker_niceness": "0",
}
"""Environment variables for a Ray that is started here, unless the user has set them."""

SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # with the largest process id

TOKEN = (
    "the cluster requires a token, which this process does not send: set RAY_AUTH_MODE=token here and for `ray start` "
    "on each node, and copy the head's ~/.ray/auth_token to all of them (or set RAY_AUTH_TOKEN)"
)
ATTEMPTS, SLOW_START = 3, "timed out during startup"  # Ray's error when its processes take more than 30 s to start
START_IT = "is it running? On the head: ray start --head --port=6379; to train on this machine only: "


def connect(worker_logs: bool, num_nodes: int = 1) -> None:
    """Start Ray, or join the cluster. `worker_logs`: what workers print is printed here. Raises WorkerError.

    Without RAY_ADDRESS, a run on one node starts a Ray of its own, and one on several joins the cluster that runs on
    this machine.
    """
    where = os.environ.get(ADDRESS) or ("local" if num_nodes == 1 else "auto")
    if where == "local":
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        shorten_socket_paths()
    try:
        reach(where)  # Ray would try for minutes
    except (OSError, ValueError) as error:
        raise WorkerError(_why(where, error)) from error
    try:
        # Colocated roles share the devices and take turns, so Ray's own accounting of cores is not used.
        init_patiently(address=where, log_to_driver=worker_logs, logging_level="error")
    except Exception as error:
        raise WorkerError(_why(where, error)) from error
    if where != "local":
        log.info("this run uses the Ray cluster at %s", ray.get_runtime_context().gcs_address)


def ray_folder() -> Path:
    """The folder in which Ray keeps sockets and logs of a session that is started here."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


def shorten_socket_paths() -> None:
    """Let a Ray that is started here keep its sockets in /tmp if their paths would be longer than Linux allows.

    Raises WorkerError, which says what to set, if RAY_TMPDIR is what is too long, or /tmp cannot be written.
    """
    folder = ray_folder().parent
    longest = MAX_SOCKET_PATH - len(f"/ray/{SOCKET}")
    if len(os.fsencode(folder.absolute())) <= longest:
        return
    if os.environ.get("RAY_TMPDIR") or not os.access("/tmp", os.W_OK | os.X_OK):
        raise WorkerError(
            f"Ray's sockets cannot be in {folder}, whose path is too long: set RAY_TMPDIR to a folder that can be "
            f"written, with a path of at most {longest} bytes"
        )
    log.info("the path of %s is too long for Ray's sockets: they are in /tmp/ray (RAY_TMPDIR sets another)", folder)
    os.environ["RAY_TMPDIR"] = "/tmp"


def disconnect() -> None:
    """End the Ray that was started, or leave the cluster. Nothing is sent to the terminal when the process ends: Ray's
    library for colours would send a control code, behind all that a run says.
    """
    ray.shutdown()
    if colours := sys.modules.get("colorama.initialise"):
        atexit.unregister(colours.reset_all)


def init_patiently(**options: Any) -> None:
    """`ray.init`, of a new Ray unless an `address` is given; retried if the machine was too slow for it.

    Raises what it raises, even a bare Exception.
    """
    # A clone in a folder with a space in its name: Ray starts workers by a line of bash, and does not quote it.
    quoted = shlex.quote(sys.executable)
    if options.setdefault("address", "local") == "local" and quoted != sys.executable:
        options["runtime_env"] = {"py_executable": quoted} | options.get("runtime_env", {})
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(include_dashboard=False, **options)
            return
        except Exception as error:
            if SLOW_START not in str(error) or attempt == ATTEMPTS:
                raise
            log.warning("Ray's processes did not start within 30 s, as on a busy machine; trying again")
            ray.shutdown()


def reach(address: str) -> None:
    """Raise OSError when nobody listens at `address` (host:port or ray://host:port), ValueError when it is malformed.

    Accepts "local" and "auto", which are left to Ray.
    """
    if address in ("local", "auto"):
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or (CLIENT_PORT if parts.scheme == "ray" else None)
    if not parts.hostname or port is None:
        raise ValueError("this is not host:port")
    socket.create_connection((parts.hostname, port), REACH_S).close()


def _why(where: str, error: Exception) -> str:
    if where == "local":
        told = f"Ray could not be started on this machine: {error}"
        if SLOW_START in told:  # also when a process of Ray's ended at once
            told += f" What they wrote is in {ray_folder() / 'session_latest' / 'logs'}; begin with raylet.err there."
        return told
    given = os.environ.get(ADDRESS)
    alone = f"unset {ADDRESS}" if given else "trainer.nnodes=1"
    told = TOKEN if "InvalidAuthToken" in "".join(format_exception(error)) else START_IT + alone
    named = f"at {ADDRESS}={where}" if given else f"on this machine (there is no {ADDRESS})"
    return f"the Ray cluster {named} cannot be joined ({error}); {told}"
