"""Middleware around every request (the bearer token, refusals of web pages of other sites and while the server drains),
and what the server counts, in the text format of Prometheus.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from search_r1.http.client import is_loopback

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class StageMetrics:
    """Metrics of one batched stage: `stage` is the prefix of their names, `unit` is what they count."""

    def __init__(self, registry: CollectorRegistry, stage: str, unit: str) -> None:
        self.stage, self.unit = stage, unit
        name = unit.capitalize()
        self._batch_size = Histogram(
            f"{stage}_batch_{unit}", f"{name} in a batch.", registry=registry, buckets=_BATCH_SIZES
        )
        self._batch_s = Histogram(f"{stage}_batch_seconds", "Time of a batch.", registry=registry, buckets=_SECONDS)
        self.queue = Gauge(f"{stage}_queue_{unit}", f"{name} that wait for a batch.", registry=registry)
        self.shared = Counter(
            f"{stage}_shared_{unit}", f"{name} that joined an equal one in flight.", registry=registry
        )
        self.cache_bytes = Gauge(f"{stage}_cache_bytes", "Estimated bytes of the cache.", registry=registry)
        self.cache_hits = Counter(f"{stage}_cache_hits", f"{name} answered from the cache.", registry=registry)
        self.cache_misses = Counter(f"{stage}_cache_misses", f"{name} not in the cache.", registry=registry)

    def batch_done(self, size: int, seconds: float) -> None:
        self._batch_size.observe(size)
        self._batch_s.observe(seconds)


class Metrics:
    """The metrics of a server. Each instance has its own registry: two servers in one process stay separate.

    `server` prefixes the names.
    """

    def __init__(self, server: str = "retrieval") -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{server}_requests", "Requests by route and HTTP status.", ["route", "status"], registry=registry
        )
        self._request_s = Histogram(
            f"{server}_request_seconds", "Time to answer a request.", ["route"], registry=registry, buckets=_SECONDS
        )
        self.rejected = Counter(f"{server}_rejected", "Requests refused: the queue was full.", registry=registry)
        self.expired = Counter(f"{server}_expired", "Requests whose deadline passed.", registry=registry)
        self.gone = Counter(f"{server}_gone", "Requests whose client went away.", registry=registry)
        self.errors = Counter(f"{server}_errors", "Requests whose search failed.", registry=registry)
        self.failed_queries = Counter(
            f"{server}_failed_queries", "Queries that failed in requests that were answered.", registry=registry
        )
        ProcessCollector(registry=registry)
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def request_done(self, route: str, status: int, seconds: float) -> None:
        counts = self._by_route.get((route, status))
        if counts is None:  # looking labels up costs more than counting
            counts = self._requests.labels(route, str(status)), self._request_s.labels(route)
            self._by_route[route, status] = counts
        counts[0].inc()
        counts[1].observe(seconds)

    @cached_property
    def search(self) -> StageMetrics:
        """Metrics of the index search."""
        return StageMetrics(self.registry, "retrieval", "queries")

    @cached_property
    def rerank(self) -> StageMetrics:
        """Metrics of the reranker."""
        return StageMetrics(self.registry, "rerank", "pairs")

    async def render(self) -> bytes:
        """The body of `GET /metrics`."""
        return generate_latest(self.registry)


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
    """`not_ready`: why the server should get no traffic yet, "" once ready. `running` counts requests, not probes.

    `on_loopback`: it listens where this machine alone reaches it.
    """

    not_ready: str = ""
    on_loopback: bool = False
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
        """Without a `token`, every client is served; on a loopback address, no web page of another site.

        `refusal(status, message)` is the JSON of a refusal. Requests to `open_paths` need no token, and may come from
        any page. The token is never logged.
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
        if path not in self._open_paths:
            if self._token and not self._has_token(scope):
                headers = {"WWW-Authenticate": "Bearer"}
                return JSONResponse(self._body_of(401, "send the header Authorization: Bearer <token>"), 401, headers)
            if not self._token and self._state.on_loopback and (why := _foreign(scope)):
                return JSONResponse(self._body_of(403, why), 403)
        if self._state.draining and path not in _PROBES:
            headers = {"Retry-After": "1", "Connection": "close"}
            return JSONResponse(self._body_of(503, "the server is stopping"), 503, headers)
        return None

    def _has_token(self, scope: Scope) -> bool:
        assert self._token is not None
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, token = header.partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


_is_here = lru_cache(maxsize=64)(is_loopback)


def _foreign(scope: Scope) -> str:
    """What is wrong with a request that a web page of another site may have made; "" if it comes from this machine.

    Such a page can send requests to a loopback address (`Origin` is its own), or reach it by a name of its site that
    leads there (`Host`), and then reads the replies.
    """
    for name, value in scope["headers"]:
        if name == b"origin" and not _is_here(value.decode("latin-1")):
            return "a web page of another site may not use this server; clients with a token may: set --auth_token"
        if name == b"host" and not _is_here(f"http://{value.decode('latin-1')}"):
            return "ask this server as localhost or 127.0.0.1; to reach it by another name, set --auth_token"
    return ""
