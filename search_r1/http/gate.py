"""Middleware around every request: the bearer token, refusals while the server drains, metrics."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping, Set
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, Response

from search_r1.http.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FAILED_QUERIES = "failed_queries"  # in the scope of a request that was answered: how many of its queries were not
OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # without a token: an orchestrator asks them
_PROBES = OPEN_PATHS | {"/health", "/metrics"}  # answered while the server drains


def detail_body(_status: int, message: str) -> dict[str, str]:
    """The JSON of an error reply, in FastAPI's format."""
    return {"detail": message}


@dataclass
class ServerState:
    """`not_ready`: why the server should get no traffic yet, "" once ready. `running` counts requests, not probes."""

    not_ready: str = ""
    draining: bool = False
    running: int = 0


class StatusRecorder:
    """A `send` that remembers the HTTP status; 500 until there is one."""

    def __init__(self, send: Send) -> None:
        self.status = 500
        self._send = send

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        await self._send(message)


class Gate:
    """ASGI middleware around all routes."""

    def __init__(
        self,
        app: App,
        state: ServerState,
        metrics: Metrics,
        token: str | None,
        refusal: Callable[[int, str], Any] = detail_body,
        open_paths: Set[str] = OPEN_PATHS,
    ) -> None:
        """Without a `token`, every client is served. The token is never logged.

        `refusal(status, message)` is the JSON of a refusal. Requests to `open_paths` need no token.
        """
        self._app = app
        self._state = state
        self._metrics = metrics
        self._token = token.encode() if token else None
        self._body_of = refusal
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, reply = time.perf_counter(), StatusRecorder(send)
        is_work = scope["path"] not in _PROBES
        self._state.running += is_work
        try:
            await (self._refusal(scope) or self._app)(scope, receive, reply)
        finally:
            self._state.running -= is_work
            # the template of the route, never what the client made up: a label must not grow without bound
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.request_done(route, reply.status, time.perf_counter() - start)
            self._metrics.failed_queries.inc(scope.get(FAILED_QUERIES, 0))

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        if self._token and path not in self._open_paths and not self._has_token(scope):
            headers = {"WWW-Authenticate": "Bearer"}
            return JSONResponse(self._body_of(401, "send the header Authorization: Bearer <token>"), 401, headers)
        if self._state.draining and path not in _PROBES:
            headers = {"Retry-After": "1", "Connection": "close"}
            return JSONResponse(self._body_of(503, "the server is stopping"), 503, headers)
        return None

    def _has_token(self, scope: Scope) -> bool:
        assert self._token is not None
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"
