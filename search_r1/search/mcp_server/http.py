"""The MCP tool over HTTP: the streamable HTTP transport, stateless, behind the gate of the server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from search_r1.http.client import is_loopback
from search_r1.http.gate import App, Metrics, Scope
from search_r1.http.routes import MAX_BODY_BYTES, RawRoute, answer_in_time
from search_r1.search.mcp_server.tool import sdk_module, search_server
from search_r1.search.server.routes import SearchOptions
from search_r1.search.server.source_interface import Source

MCP_PATH = "/mcp"


def mcp_router(source: Source, options: SearchOptions, metrics: Metrics) -> APIRouter:
    """`POST /mcp`; include it in the app of `create_app`. Raises `ServerError` without the package `mcp`.

    Every request is independent and answered with JSON: no stream is open when the server stops, and any of several
    servers can answer. A request whose client disconnects is cancelled, as on the other routes.
    """
    # Host is checked by the gate, and only on a loopback address: elsewhere the server may be reached by any name.
    manager = sdk_module("mcp.server.streamable_http_manager").StreamableHTTPSessionManager(
        search_server(source, options, metrics),
        json_response=True,
        stateless=True,
        max_request_body_size=MAX_BODY_BYTES,
    )

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with manager.run():
            yield

    router = APIRouter(route_class=RawRoute, lifespan=lifespan)

    @router.post(MCP_PATH, include_in_schema=False)
    async def mcp(http: Request) -> Response:
        # Browsers send the page's origin: DNS rebinding may let a page of another site reach this machine.
        origin = http.headers.get("origin")
        if origin is not None and not is_loopback(origin):
            raise HTTPException(403, "a web page of another site may not use this tool")
        # the tool keeps `options.timeout_s`, so that a late answer is a tool error
        return await answer_in_time(http, math.inf, lambda body: _exchange(manager.handle_request, http.scope, body))

    return router


async def _exchange(app: App, scope: Scope, body: bytes) -> Response:
    """The reply of the ASGI app to a request with this body."""
    # The body has been read already, to limit its size, so the app receives it from here, in one message.
    sent: list[Any] = []
    request = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        for message in request:
            return message
        return await asyncio.get_running_loop().create_future()  # `answer_in_time` sees the client leave

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    # ASGI sends the status and the headers first, then the parts of the body.
    start, *parts = sent
    response = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
    response.raw_headers = start["headers"]
    return response
