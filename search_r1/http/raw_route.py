"""Routes whose endpoint reads the body of the request itself, and the direct way to them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from search_r1.http.gate import App, Receive, Scope, Send


class RawRoute(APIRoute):
    """A route whose endpoint takes the request as it came: it reads the body itself, to bound and to watch it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI document says of the body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def json_response(body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    """`body` is JSON already."""
    return Response(body, media_type="application/json", headers=headers)


class ShortCut:
    """ASGI middleware that calls the endpoints of raw routes itself.

    The layers of the framework between the two take longer than all else that a cached answer needs.
    """

    def __init__(self, app: App, routes: Sequence[object], handlers: Mapping[Any, Any]) -> None:
        """`handlers`: what answers an exception of a class, as `FastAPI.exception_handlers`."""
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
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except Exception as error:
            handler = next((self._handlers[kind] for kind in type(error).__mro__ if kind in self._handlers), None)
            if handler is None:
                raise
            response = await handler(request, error)
        await response(scope, receive, send)
