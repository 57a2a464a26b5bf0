"""What the apps share of their routes: the metrics route, the replies to requests that ran out of time, and routes
whose endpoint reads the request body itself.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel

from search_r1.http.deadline import ClientGone, DeadlineExpired
from search_r1.http.gate import App, Metrics, Receive, Scope, Send, detail_body


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
