"""The replies to requests that end with an error, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import StarletteHTTPException
from fastapi.responses import JSONResponse

from search_r1.errors import ServiceUnavailable
from search_r1.http.gate import Metrics
from search_r1.http.routes import add_deadline_handlers
from search_r1.serve.wire import INTERNAL_ERROR, ApiError, error_body
from verl.errors import VerlError

RETRY_AFTER_S = 1
# OpenAI's clients repeat what failed with a status of 500 and more: twice more the time that a whole episode took.
NO_RETRY = {"x-should-retry": "false"}


def add_openai_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    """Reply to errors of the request, of the service and of the framework, and count them. Only 503 may be repeated."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return _reply(error.body, error.status)

    @app.exception_handler(StarletteHTTPException)
    async def refused_by_framework(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return _reply(error_body(error.status_code, error.detail), error.status_code, headers=error.headers)

    @app.exception_handler(ServiceUnavailable)
    async def overloaded(_: Request, error: ServiceUnavailable) -> JSONResponse:
        metrics.rejected.inc()
        return _reply(error_body(503, str(error)), 503, error.retry_after_s)

    @app.exception_handler(VerlError)
    async def failed(_: Request, error: VerlError) -> JSONResponse:
        metrics.errors.inc()
        return _reply(error_body(500, str(error)), 500)

    # The framework raises such an error again behind the reply, so that the server logs it.
    @app.exception_handler(Exception)
    async def broke(_: Request, error: Exception) -> JSONResponse:
        metrics.errors.inc()
        return _reply(error_body(500, INTERNAL_ERROR), 500)

    add_deadline_handlers(app, metrics, error_body, NO_RETRY)


def _reply(
    body: dict[str, Any], status: int, retry_after_s: int = RETRY_AFTER_S, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    repeated = {"Retry-After": str(retry_after_s)} if status == 503 else NO_RETRY
    return JSONResponse(body, status, repeated | dict(headers or {}))
