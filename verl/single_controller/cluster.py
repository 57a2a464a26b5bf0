"""The Ray of a run: the cluster that RAY_ADDRESS names, or one of this machine that is started for it."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from traceback import format_exception
from typing import Any
from urllib.parse import urlsplit

import ray

from verl.errors import WorkerError

log = logging.getLogger(__name__)

ADDRESS = "RAY_ADDRESS"
CLIENT_PORT = 10001  # of ray:// addresses
REACH_S = 10.0
RAY_SETTINGS = {
    # On one machine the control store never comes back.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # A process per core, started in advance, would serve nobody: each role has an environment of its own.
    "RAY_prestart_worker_first_driver": "0",
    # Ray's own choice, 15, leaves trainers and engines a thirtieth of a core beside whatever else is busy there,
    # a retrieval server for one.
    "RAY_worker_niceness": "0",
}
"""Environment variables of a Ray that starts here, where the user has not set them."""

TOKEN = (
    "the cluster asks for a token that this process does not send: set RAY_AUTH_MODE=token here and where `ray start` "
    "is called on each node, with the head's ~/.ray/auth_token on all of them (or RAY_AUTH_TOKEN)"
)
ATTEMPTS, SLOW_START = 3, "timed out during startup"  # of what Ray allows 30 s
START_IT = "is it there? On the head: ray start --head --port=6379; to train on this machine alone: unset RAY_ADDRESS"


def connect(worker_logs: bool) -> None:
    """Start Ray, or join the cluster. `worker_logs`: what workers print is printed here. Raises WorkerError."""
    where = os.environ.get(ADDRESS, "")
    if where in ("", "local"):
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
    try:
        reach(where)  # Ray would try for minutes
    except (OSError, ValueError) as error:
        raise WorkerError(_why(error)) from error
    try:
        # Colocated roles share the devices and take turns, so Ray's own accounting of cores is not used.
        init_patiently(log_to_driver=worker_logs, logging_level="error")
    except Exception as error:
        raise WorkerError(_why(error)) from error


def disconnect() -> None:
    """End the Ray that was started, or leave the cluster. Nothing is sent to the terminal when the process ends: Ray's
    library for colours would send a control code, behind all that a run says.
    """
    ray.shutdown()
    if colours := sys.modules.get("colorama.initialise"):
        atexit.unregister(colours.reset_all)


def init_patiently(**options: Any) -> None:
    """`ray.init`, once more where a busy machine was too slow for it. Raises what it raises, a bare Exception too."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            ray.init(include_dashboard=False, **options)
            return
        except Exception as error:
            if SLOW_START not in str(error) or attempt == ATTEMPTS:
                raise
            log.warning("Ray's processes did not start within 30 s: this machine is busy; starting them once more")
            ray.shutdown()


def reach(address: str) -> None:
    """Raises OSError when nobody listens at `address` (host:port or ray://host:port), ValueError when it is none.

    Fine for "", "local" and "auto", where Ray looks for itself.
    """
    if address in ("", "local", "auto"):
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    port = parts.port or (CLIENT_PORT if parts.scheme == "ray" else None)
    if not parts.hostname or port is None:
        raise ValueError("this is not host:port")
    socket.create_connection((parts.hostname, port), REACH_S).close()


def _why(error: Exception) -> str:
    where = os.environ.get(ADDRESS)
    if not where or where == "local":
        return f"Ray could not be started on this machine: {error}"
    told = TOKEN if "InvalidAuthToken" in "".join(format_exception(error)) else START_IT
    return f"Ray's cluster at {ADDRESS}={where} cannot be joined ({error}); {told}"
