"""What the apps share of their routes: a request's deadline, at which its work is cancelled, and the replies then; the
metrics route; and routes whose endpoint reads the request body itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from search_r1.errors import ServiceUnavailable
from search_r1.http.gate import App, Metrics, Receive, Scope, Send, detail_body

T = TypeVar("T")

MAX_BODY_BYTES = 32 << 20  # of one request
MAX_BODIES_BYTES = 512 << 20  # of all requests of this process that are read or answered
DEADLINE_HEADER = b"x-deadline-ms"


class DeadlineExpired(Exception):
    """The request could not be answered in time."""


class ClientGone(Exception):
    """The client disconnected before the reply."""


class Bodies:
    """Limits the bytes of all request bodies together, so that many large uploads at once cannot exhaust the memory."""

    total = 0

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._own, self._max_bytes = 0, max_bytes

    def __enter__(self) -> Bodies:
        return self

    def __exit__(self, *_: object) -> None:
        Bodies.total -= self._own

    def add(self, num_bytes: int) -> None:
        """Count more bytes of a body. Raises `HTTPException` if it is too large, `ServiceUnavailable` if all are."""
        self._own += num_bytes
        Bodies.total += num_bytes
        if self._own > self._max_bytes:
            raise HTTPException(413, f"the request is larger than {self._max_bytes} bytes; send less at once")
        if Bodies.total > MAX_BODIES_BYTES:
            raise ServiceUnavailable(f"request bodies exceed {MAX_BODIES_BYTES} bytes; retry in 1 s", retry_after_s=1)


async def answer_in_time(
    http: Request, timeout_s: float, work: Callable[[bytes], Awaitable[T]], max_body_bytes: int = MAX_BODY_BYTES
) -> T:
    """The result of `work(body)`, which is cancelled when the client disconnects or the deadline passes.

    The deadline is `allowed_s` seconds from now. Raises `DeadlineExpired`, `ClientGone`, `ServiceUnavailable` while too
    much is being uploaded, or `HTTPException` when the body is too large or the header is not a number.
    """
    # The clock also runs while the body is read; the client's disconnect is noticed once it is read.
    timeout_s = allowed_s(http, timeout_s)
    clock = asyncio.timeout(timeout_s)
    watch: asyncio.Task[None] | None = None
    try:
        with Bodies(max_body_bytes) as bodies:
            async with clock:
                body = await _body(http, bodies)
                watch = asyncio.create_task(_watch(http, clock))
                try:
                    return await work(body)
                finally:
                    watch.cancel()
    # A TimeoutError is the work's own, or the clock's: then the client went away or the deadline passed.
    except TimeoutError as error:
        if not clock.expired():
            raise
        if watch is not None and watch.done():
            raise ClientGone from error
        raise DeadlineExpired(f"not answered within the deadline of {timeout_s:g} s") from error


def allowed_s(http: Request, timeout_s: float) -> float:
    """`timeout_s`, or the milliseconds of the header X-Deadline-Ms if that is less.

    Raises `HTTPException` if the header is not a number.
    """
    header = next((value for name, value in http.scope["headers"] if name == DEADLINE_HEADER), None)
    if header is None:
        return timeout_s
    try:
        header_s = float(header) / 1000
    except ValueError:
        header_s = math.nan
    if math.isnan(header_s):
        raise HTTPException(422, "the header X-Deadline-Ms must be a number of milliseconds")
    return min(timeout_s, header_s)


async def _body(http: Request, bodies: Bodies) -> bytes:
    chunks, more = [], True
    while more:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        bodies.add(len(chunks[-1]))
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _watch(http: Request, clock: asyncio.Timeout) -> None:
    """Expire the timeout when the client disconnects."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    clock.reschedule(0.0)


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    """`GET /metrics`."""

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Counters in the text format of Prometheus."""
        return Response(await metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_deadline_handlers(
    app: FastAPI,
    metrics: Metrics,
    error_body: Callable[[int, str], Any] = detail_body,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Reply to `DeadlineExpired` and `ClientGone`, and count them. `error_body(status, message)` makes the JSON of the
    first, which has the `headers`."""

    @app.exception_handler(DeadlineExpired)
    async def expired(_: Request, error: DeadlineExpired) -> JSONResponse:
        metrics.expired.inc()
        return JSONResponse(error_body(504, str(error)), 504, headers)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        metrics.gone.inc()
        return Response(status_code=499)  # the client is gone; the status is for the metrics


class RawRoute(APIRoute):
    """A route whose endpoint reads the body itself, to limit its size and to notice a disconnect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of the request body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def json_response(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    """A reply with `body`, which is JSON already."""
    return Response(body, media_type="application/json", headers=headers)


class ShortCut:
    """ASGI middleware that calls the endpoints of raw routes directly.

    The framework's layers in between take longer than everything else that a cached answer needs.
    """

    def __init__(self, app: App, routes: Sequence[object], handlers: Mapping[Any, Any]) -> None:
        """`handlers`: exception handlers by class, as `FastAPI.exception_handlers`."""
        self._app, self._routes, self._handlers = app, routes, handlers

    @cached_property
    def _direct(self) -> dict[tuple[str, str], RawRoute]:
        raw = [route for route in self._routes if isinstance(route, RawRoute)]
        return {(method, route.path): route for route in raw for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        # The gate counts requests by their route, which the framework would have noted here.
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except Exception as error:
            # Like the framework, take the handler of the nearest base class that has one.
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)
