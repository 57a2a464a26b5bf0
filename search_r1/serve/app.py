"""The HTTP side: OpenAI's chat completions from a search agent, behind the same gate as the retrieval server."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from search_r1.errors import ServiceUnavailable
from search_r1.http.gate import Gate, Metrics, ServerState
from search_r1.http.routes import RawRoute, add_metrics_route, answer_in_time, schema_of
from search_r1.llm_agent.agent import SearchAgent
from search_r1.serve.access_log import AccessLog, notes_of
from search_r1.serve.chat import Chat, ServeOptions
from search_r1.serve.error_replies import RETRY_AFTER_S, add_openai_error_handlers
from search_r1.serve.wire import ChatRequest, error_body, parse_chat
from verl.agent.environment import StreamingSampler
from verl.errors import RolloutError

MAX_BODY_BYTES = 1 << 20


def create_app(agent: SearchAgent, sampler: StreamingSampler, options: ServeOptions) -> FastAPI:
    """The app that serves `agent`, whose sampler is `sampler`. `app.state.server` is its `ServerState`."""
    app, state, metrics = FastAPI(title="search agent"), ServerState(), Metrics("search_r1")
    app.state.server = state
    app.add_middleware(Gate, state=state, metrics=metrics, token=options.auth_token, refusal=error_body)
    if options.access_log:
        app.add_middleware(AccessLog)
    app.include_router(_chat_routes(Chat(agent, options, metrics), state))
    _add_probes(app, sampler, metrics)
    add_openai_error_handlers(app, metrics)
    return app


def _chat_routes(chat: Chat, state: ServerState) -> APIRouter:
    router, started = APIRouter(), int(time.time())
    options = chat.options
    reads_history = options.history == "use"

    # The route reads its body itself: its size is limited, and a client that goes away ends the episode.
    async def chat_completions(http: Request) -> Response:
        """Answer the question in the last message."""
        if state.running > options.max_concurrent:
            raise ServiceUnavailable(f"{options.max_concurrent} requests are in progress", RETRY_AFTER_S)
        notes = notes_of(http.scope)
        return await answer_in_time(
            http, options.timeout_s, lambda body: chat.respond(parse_chat(body, reads_history), notes), MAX_BODY_BYTES
        )

    router.add_api_route(
        "/v1/chat/completions",
        chat_completions,
        methods=["POST"],
        route_class_override=RawRoute,
        openapi_extra=schema_of(ChatRequest),
    )

    # OpenAI's clients look for the model's name before they ask.
    model = {"id": options.model, "object": "model", "created": started, "owned_by": "search_r1"}

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The one model by its name, which may have slashes."""
        chat.check_model(name)
        return model

    return router


def _add_probes(app: FastAPI, sampler: StreamingSampler, metrics: Metrics) -> None:
    state: ServerState = app.state.server

    async def health() -> JSONResponse:
        """Whether the engine lives; how many requests are in progress, and how many turns are being sampled."""
        try:
            await sampler.check()
        except RolloutError as error:
            return JSONResponse({"status": str(error)}, 503)
        return JSONResponse({"status": "ok", "running": state.running, "sampling": sampler.num_running})

    for path in ("/health", "/healthz"):
        app.add_api_route(path, health)

    add_metrics_route(app, metrics)
