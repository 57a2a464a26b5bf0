"""One log line per request: method, path, status, seconds, and the route's notes."""

from __future__ import annotations

import logging
import time
from urllib.parse import quote

from search_r1.http.gate import App, Receive, Scope, Send, StatusRecorder

log = logging.getLogger(__name__)

Notes = list[str]
PROBES = frozenset({"/health", "/healthz", "/metrics"})  # asked every few seconds, by machines
_KEY = "search_r1.notes"


def notes_of(scope: Scope) -> Notes:
    """The notes at the end of the log line of the request `scope`; its route appends to them."""
    notes: Notes = scope.setdefault(_KEY, [])
    return notes


class AccessLog:
    """ASGI middleware around everything that can send a reply."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        started, reply = time.perf_counter(), StatusRecorder(send)
        notes = notes_of(scope)
        try:
            await self._app(scope, receive, reply)
        finally:
            seconds = f"{time.perf_counter() - started:.2f} s"
            path = quote(scope["path"])  # what a client sends must not begin a line of its own
            log.info("%s %s %d %s", scope["method"], path, reply.status, ", ".join([seconds, *notes]))
