"""The HTTP side: the page and its JSON, behind the same gate as the other servers."""

from __future__ import annotations

import json
import math
from asyncio import to_thread
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from search_r1.http.gate import OPEN_PATHS, App, Gate, Metrics, Receive, Scope, Send, ServerState
from search_r1.http.routes import add_deadline_handlers, add_metrics_route, answer_in_time
from search_r1.viewer.export import export_html
from search_r1.viewer.pages import Pages
from search_r1.viewer.queries import CompareQuery, RowsQuery
from verl.errors import VerlError

T = TypeVar("T")
InTime = Callable[[Request, Callable[[], Awaitable[Any]]], Awaitable[Response]]

STATIC = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


def create_app(pages: Pages, metrics: Metrics, token: str | None = None, timeout_s: float = 120.0) -> FastAPI:
    """`app.state.server` is its `ServerState`. The page itself contains no data and needs no `token`."""
    app, state = FastAPI(title="trajectories", docs_url=None, redoc_url=None), ServerState()
    app.state.server = state
    static = {f"/static/{path.relative_to(STATIC)}": path for path in STATIC.rglob("*") if path.suffix in TYPES}
    open_paths = OPEN_PATHS | {"/", *static}
    app.add_middleware(Gate, state=state, metrics=metrics, token=token, open_paths=open_paths)
    app.add_middleware(Headers)
    app.include_router(_page_routes(static))
    app.include_router(_data_routes(pages, timeout_s))
    _add_probes(app, state, metrics)
    _add_error_handlers(app, metrics)
    return app


class Headers:
    """ASGI middleware for security headers: a browser runs and loads only files from this server."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class PlainResponse(JSONResponse):
    """JSON in which broken Unicode is kept as an escape, and NaN and infinities, which JSON lacks, become strings."""

    def render(self, content: Any) -> bytes:
        return json.dumps(_finite(content), ensure_ascii=True, separators=(",", ":")).encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _page_routes(static: dict[str, Path]) -> APIRouter:
    router = APIRouter()

    def served(path: Path) -> Callable[[], FileResponse]:
        return lambda: FileResponse(path, media_type=f"{TYPES[path.suffix]}; charset=utf-8")

    for route, path in {"/": STATIC / "index.html", **static}.items():
        router.add_api_route(route, served(path), response_model=None, include_in_schema=False)
    return router


def _data_routes(pages: Pages, timeout_s: float) -> APIRouter:
    router = APIRouter(prefix="/api")

    # Every answer that reads files ends at the deadline, or when the browser goes away.
    async def in_time(http: Request, work: Callable[[], Awaitable[T]]) -> Response:
        async def answered(_: bytes) -> Response:
            return await to_thread(PlainResponse, await work())  # the text of a large answer takes a while

        return await answer_in_time(http, timeout_s, answered)

    # The list of a run, and what its filters can be set to.
    @router.get("/runs")
    def runs() -> Response:
        """All runs with their files."""
        return PlainResponse(pages.runs())

    @router.get("/rows")
    async def rows(http: Request, asked: Annotated[RowsQuery, Query()]) -> Response:
        """A page of the list."""
        return await in_time(http, lambda: pages.rows(asked.run, asked))

    @router.get("/facets")
    async def facets(http: Request, run: str, kind: str | None = None, step: int | None = None) -> Response:
        """Data sources, statuses and components."""
        return await in_time(http, lambda: pages.facets(run, kind, step))

    # One trajectory, as data for the page or as a file.
    @router.get("/trajectory")
    async def trajectory(http: Request, run: str, file: str, row: int) -> Response:
        """One trajectory."""
        return await in_time(http, lambda: pages.trajectory(run, file, row))

    @router.get("/export")
    async def export(http: Request, run: str, file: str, row: int) -> Response:
        """One trajectory as an HTML file."""

        async def page(_: bytes) -> bytes:
            return await to_thread(export_html, await pages.trajectory(run, file, row))

        attached = {"content-disposition": 'attachment; filename="trajectory.html"'}  # never shown in this origin
        html = await answer_in_time(http, timeout_s, page)
        return Response(html, media_type="text/html; charset=utf-8", headers=attached)

    # Trajectories side by side: of a prompt, of a question, of two files.
    @router.get("/group")
    async def group(http: Request, run: str, file: str, group: str) -> Response:
        """The samples of a prompt."""
        return await in_time(http, lambda: pages.group(run, file, group))

    @router.get("/question")
    async def question(http: Request, run: str, file: str, row: int, other_run: str, other_file: str) -> Response:
        """The samples of a row's question in another file."""
        return await in_time(http, lambda: pages.question(run, file, row, other_run, other_file))

    @router.get("/compare")
    async def compare(http: Request, asked: Annotated[CompareQuery, Query()]) -> Response:
        """The questions of two files."""
        left, right = (asked.run, asked.file), (asked.other_run, asked.other_file)
        return await in_time(http, lambda: pages.comparison(left, right, asked))

    _add_dashboard(router, pages, in_time)
    return router


def _add_dashboard(router: APIRouter, pages: Pages, in_time: InTime) -> None:
    @router.get("/dashboard")
    async def dashboard(http: Request, run: Annotated[list[str], Query()], by_seed: bool = True) -> Response:
        """The curves of one run, or of several."""
        return await in_time(http, lambda: pages.dashboard(run, by_seed))

    @router.get("/dashboard/version")
    async def version(http: Request, run: Annotated[list[str], Query()]) -> Response:
        """Whether there is something new to draw."""
        return await in_time(http, lambda: pages.dashboard_version(run))

    @router.get("/timeline")
    async def timeline(http: Request, run: str, step: int) -> Response:
        """What each process did in a step."""
        return await in_time(http, lambda: pages.timeline(run, step))


def _add_probes(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    @app.get("/healthz")
    def health() -> dict[str, Any]:
        """How many requests are in progress."""
        return {"status": "ok", "running": state.running}

    add_metrics_route(app, metrics)


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(VerlError)
    async def failed(_: Request, error: VerlError) -> Response:
        metrics.errors.inc()
        return PlainResponse({"detail": str(error)}, 404)

    add_deadline_handlers(app, metrics)
