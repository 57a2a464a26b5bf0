"""Servers in threads of the test process, from their own command lines or around any app."""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import requests
import uvicorn
from fastapi import FastAPI

from search_r1.http import process
from search_r1.http.process import DrainingServer, draining_server

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def listen(port: int = 0) -> socket.socket:
    """The port is taken; until a server runs on it, connections are refused."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def address(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def running(server: uvicorn.Server, listener: socket.socket) -> Iterator[str]:
    """The server in a thread: its address. At the end it stops as it does at SIGTERM."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join(timeout=PATIENCE_S)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def running_app(app: FastAPI) -> Iterator[tuple[str, DrainingServer]]:
    """An app of `create_app` as `main` runs it; `should_exit` does what SIGTERM does."""
    listener = listen()
    server = draining_server(app, listener)
    with running(server, listener) as url:
        yield url, server


@contextmanager
def served(*arguments: str, module: str = "retrieval_server", **variables: str) -> Iterator[str]:
    """The address of what the `main` of a module of search_r1.search serves, once it is ready.

    All of `main` is run but the life of the process: its signals and its settings of the interpreter.
    """
    program = importlib.import_module(f"search_r1.search.{module}")
    urls: list[str] = []
    with ExitStack() as servers:

        def serve(app: FastAPI, listener: socket.socket) -> None:
            urls.append(servers.enter_context(running(draining_server(app, listener), listener)))

        with mock.patch.dict(os.environ, variables), mock.patch.object(process, "serve", serve):
            assert program.main(["--port", "0", *arguments]) == 0, "the reason is on stderr"
        wait_until(lambda: requests.get(f"{urls[0]}/readyz", timeout=PATIENCE_S).status_code == 200)
        yield urls[0]
