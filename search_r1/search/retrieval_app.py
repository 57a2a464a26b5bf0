"""The retrieval server's HTTP app: search routes and pages over a source, and the MCP tool if requested."""

from __future__ import annotations

from fastapi import FastAPI

from search_r1.http.gate import Metrics
from search_r1.search.mcp_server.http import mcp_router
from search_r1.search.server.app import AppOptions, create_app_of
from search_r1.search.server.routes import page_router, search_router
from search_r1.search.server.source_interface import Source


def create_app(source: Source, options: AppOptions | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The app that serves `source` on the search routes and `/page`: see `create_app_of`."""
    options, metrics = options or AppOptions(), metrics or Metrics()
    app = create_app_of(source, search_router(source, options), options, metrics)
    app.include_router(page_router(source, options))
    if options.mcp:
        app.include_router(mcp_router(source, options, metrics))
    return app
