"""A front end: the HTTP side of a server whose index is in another process.

    .venv/bin/python -m search_r1.search.workers.front_end CONNECTION LISTENER < settings.json

`supervisor` starts it with two sockets, given by their file descriptors: one leads to the owner, one is bound to the
address of the service. It ends with the owner.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
from dataclasses import asdict, dataclass

from search_r1.http.process import serve
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.app import AppOptions
from search_r1.search.workers.remote_source import About, RemoteMetrics, RemoteSource

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported


@dataclass(frozen=True)
class Settings:
    """What a front end must know; it goes through a pipe, since it holds the token."""

    served: About
    options: AppOptions

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(text: str) -> Settings:
        values = json.loads(text)
        return Settings(About(**values["served"]), AppOptions(**values["options"]))


def main() -> None:
    """Serve until SIGTERM or the end of the owner."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    settings = Settings.from_json(sys.stdin.read())
    lost = False

    def stop() -> None:
        nonlocal lost
        lost = True
        signal.raise_signal(signal.SIGTERM)

    connection.setblocking(False)
    source = RemoteSource(connection, settings.served, stop)
    serve(create_app(source, settings.options, RemoteMetrics(source)), listener)
    if lost:  # nobody else removes it
        shutil.rmtree(os.environ[METRICS_VARIABLE], ignore_errors=True)


if __name__ == "__main__":
    main()
