"""One server process: its address, its token, and its life from start to shutdown."""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from program_end import exit_status
from search_r1.errors import ServerError
from search_r1.http.arguments import check_serving_arguments, read_token
from search_r1.http.client import host_and_port
from search_r1.http.gate import Metrics, ServerState

_LOG = logging.getLogger(__name__)
DRAIN_S = 10.0  # how long a stopping server waits for the requests that run
_SWITCH_S = 0.001  # Python lets a busy thread run 5 ms; the event loop should not wait that long for the index


def run_server(
    arguments: argparse.Namespace,
    build: Callable[[Metrics, str | None], tuple[str, FastAPI]],
    route: str = "/retrieve",
) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says.

    `arguments` are those of `add_serving_arguments`; `build(metrics, token)` loads, and returns a description of what
    is served and its app from `create_app`; a `SearchError` from it ends the program with a one-line message.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def load_and_serve() -> None:
        check_serving_arguments(arguments)
        token = read_token(arguments)
        # The address is reserved before the long load, so that one in use is known at once.
        listener = bind(arguments.host, arguments.port)
        what, app = build(Metrics(), token)
        announce(what, listener, token, route)
        serve(app, listener)

    return exit_status(load_and_serve, when_interrupted="")


class _Listener(socket.socket):
    """A bound socket without SO_REUSEADDR, which would let another server bind the same address until one listens.

    Once it listens it has the option, and so have its connections: a restart can bind where some have just ended.
    """

    def listen(self, *backlog: int) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().listen(*backlog)


def bind(host: str, port: int) -> socket.socket:
    """Reserve the address before a long load. Connections are refused until `serve`. Raises `ServerError`."""
    if not 0 <= port <= 65535:  # else the system takes the lowest 16 bits
        raise ServerError(f"--port is {port}; it must be from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = _Listener(family, kind, protocol)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # By connections that have just ended, if not by another server.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host_and_port(host, port)}: {error}; stop what uses it or pass another --port"
        ) from error
    return listener


def announce(what: str, listener: socket.socket, token: str | None, route: str = "/retrieve") -> None:
    """Log where `what` is served, and a warning if other machines can use it without a token."""
    host, port = listener.getsockname()[:2]
    _LOG.info("serving %s on http://%s%s", what, host_and_port(host, port), route)
    if token is None and not _is_on_loopback(listener):
        _LOG.warning("%s is reachable from other machines and there is no --auth_token: anyone can search", host)


def _is_on_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve an app of `create_app` until SIGTERM or Ctrl-C."""
    settle_process()
    # uvicorn raises the signal again after a clean stop; this handler makes that an exit with code 0
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        draining_server(app, listener).run(sockets=[listener])
    except KeyboardInterrupt:
        _LOG.info("stopped")


def draining_server(app: FastAPI, listener: socket.socket) -> DrainingServer:
    """The server at `listener` for an app whose `app.state.server` is its `ServerState`."""
    app.state.server.on_loopback = _is_on_loopback(listener)
    # not uvloop: it accepts one connection each turn, so on a busy server new clients waited for seconds
    config = uvicorn.Config(
        app,
        loop="asyncio",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    return DrainingServer(config, app.state.server)


def settle_process() -> None:
    """Tune the interpreter for an event loop next to busy threads, once everything is loaded."""
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what is loaded stays: no later collection walks through it


class DrainingServer(uvicorn.Server):
    """After the first signal it keeps listening, and replies 503, until the running requests are answered."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    async def main_loop(self) -> None:
        """uvicorn's main loop, which ends at the first signal, then the wait for running requests."""
        await super().main_loop()
        self._state.draining = True
        end = time.monotonic() + DRAIN_S
        while self._state.running and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.02)
