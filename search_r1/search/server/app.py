"""The HTTP app of a server: its routes, probes and metrics behind one gate."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from search_r1.errors import SearchError, ServiceUnavailable
from search_r1.http.gate import Gate, Metrics, ServerState
from search_r1.http.routes import ShortCut, add_deadline_handlers, add_metrics_route
from search_r1.search.server.routes import SearchOptions
from search_r1.search.server.source_interface import NeedsWarmUp, Served
from search_r1.search.server.wire import LIMITS, retry_header, status_of

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppOptions(SearchOptions):
    """`auth_token`: the bearer token that every request except /healthz and /readyz must carry; None: no token.

    `mcp`: offer the search as an MCP tool as well.
    """

    auth_token: str | None = None
    mcp: bool = False


def create_app_of(served: Served, router: APIRouter, options: AppOptions, metrics: Metrics) -> FastAPI:
    """An app with the routes of `router` that closes `served` on shutdown. `app.state.server` is its `ServerState`.

    More routes can be included in it: they are behind the same gate and may raise the same errors.
    """
    state = ServerState(not_ready="the warm-up query has not run yet")
    app = FastAPI(title="retrieval", lifespan=_lifespan(served, state))
    app.state.server = state
    app.add_middleware(ShortCut, routes=app.routes, handlers=app.exception_handlers)
    app.add_middleware(Gate, state=state, metrics=metrics, token=options.auth_token)
    app.include_router(router)
    _add_probes(app, served, options.topk, metrics)
    _add_error_handlers(app, metrics)
    return app


def _lifespan(served: Served, state: ServerState) -> Any:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(_warm_up(served, state))
        yield
        warming.cancel()
        closing = served.close()
        if inspect.isawaitable(closing):
            await closing

    return lifespan


async def _warm_up(served: Served, state: ServerState) -> None:
    try:
        if isinstance(served, NeedsWarmUp):
            await served.warm_up()
        state.not_ready = ""
    except SearchError as error:
        state.not_ready = f"the warm-up query failed: {error}"
        _LOG.error("the warm-up query failed: %s", error)


def _add_probes(app: FastAPI, served: Served, topk: int, metrics: Metrics) -> None:
    state: ServerState = app.state.server

    # What is served, and what its answers depend on.
    what = {"retriever": served.name, "corpus_size": served.num_passages, "index_version": served.version}

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        """The process lives; what it serves."""
        return {"status": "ok", "topk": topk} | what

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """What the answers depend on: equal for servers that answer alike. And what a request may hold."""
        return what | {"topk": topk, "batch_size": served.batch_size, "limits": LIMITS}

    # Whether it can be used, for an orchestrator and for FlashRAG's clients.
    @app.get("/readyz", responses={503: {"description": "Not ready yet, or stopping."}})
    async def readyz() -> JSONResponse:
        """Whether traffic should come."""
        reason = "the server is stopping" if state.draining else state.not_ready
        return JSONResponse({"status": reason or "ready"}, 503 if reason else 200)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Health as FlashRAG reports it."""
        available = int(not state.draining and not state.not_ready)
        return {"status": "healthy", "retrievers": {"total": 1, "available": available}}

    add_metrics_route(app, metrics)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(SearchError)
    async def failed(_: Request, error: SearchError) -> JSONResponse:
        if isinstance(error, ServiceUnavailable):
            metrics.rejected.inc()
        else:
            metrics.errors.inc()
            _LOG.error("search failed: %s", error)
        return JSONResponse({"detail": str(error)}, status_of(error), retry_header(error))

    add_deadline_handlers(app, metrics)
