"""What every app has: the metrics route, and the replies to requests that ran out of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from search_r1.http.deadline import ClientGone, DeadlineExpired
from search_r1.http.gate import detail_body
from search_r1.http.metrics import Metrics


def add_metrics_route(app: FastAPI, metrics: Metrics) -> None:
    """`GET /metrics`."""

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        """Counters in the text format of Prometheus."""
        return Response(await metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_deadline_handlers(app: FastAPI, metrics: Metrics, error_body: Callable[[int, str], Any] = detail_body) -> None:
    """Reply to `DeadlineExpired` and `ClientGone`, and count them; `error_body(status, message)` makes the JSON."""

    @app.exception_handler(DeadlineExpired)
    async def expired(_: Request, error: DeadlineExpired) -> JSONResponse:
        metrics.expired.inc()
        return JSONResponse(error_body(504, str(error)), 504)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        metrics.gone.inc()
        return Response(status_code=499)  # the client is gone; the status is for the metrics
