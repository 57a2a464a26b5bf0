"""The retrieval server: `POST /retrieve` and `GET /healthz` over one corpus and one index.

    python -m search_r1.search.retrieval_server --corpus_path corpus.jsonl --retriever_name bm25

Everything is loaded before the server listens, so a server that answers is ready.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from search_r1.search.errors import SearchError, ServerError
from search_r1.search.wire import MAX_BODY_BYTES, MAX_TOPK, RetrieveRequest, explain

if TYPE_CHECKING:
    from search_r1.search.service import Found, RetrievalService

_LOG = logging.getLogger(__name__)
_SCHEMA = {"requestBody": {"content": {"application/json": {"schema": RetrieveRequest.model_json_schema()}}}}


def create_app(service: RetrievalService, topk: int = 3) -> FastAPI:
    """The HTTP side of `service`; `topk` passages a query unless the request says otherwise."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="retrieval", lifespan=lifespan)

    @app.post("/retrieve", openapi_extra=_SCHEMA)
    async def retrieve(http: Request) -> Response:
        request = _parse(await _body(http))
        found = await service.search(request.texts(), request.topk or topk)
        return Response(_encode(found, request.return_scores), media_type="application/json")

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {
            "status": "ok",
            "retriever": service.retriever.name,
            "corpus_size": len(service.corpus),
            "topk": topk,
        }

    @app.exception_handler(SearchError)
    async def failed(_: Request, error: SearchError) -> JSONResponse:
        _LOG.error("search failed: %s", error)
        return JSONResponse({"detail": str(error)}, status_code=500)

    return app


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request is larger than {MAX_BODY_BYTES} bytes; send fewer queries at once")
    return bytes(body)


def _parse(body: bytes) -> RetrieveRequest:
    try:
        return RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, explain(error)) from error


def _encode(found: list[list[Found]], return_scores: bool) -> bytes:
    if return_scores:
        result: Any = [[{"document": passage, "score": score} for passage, score in query] for query in found]
    else:
        result = [[passage for passage, _ in query] for query in found]
    return json.dumps({"result": result}, ensure_ascii=False).encode()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and `--host`, `--port`, `--num_threads`, `--cache_passages`."""
    parser = argparse.ArgumentParser(description="Serve passages over HTTP.")
    parser.add_argument("--index_path", help="FAISS file or BM25 folder; BM25 without it is built in memory")
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--topk", type=int, default=3, help="passages a query when the request does not say")
    parser.add_argument("--retriever_name", default="e5", help="bm25, or the family of a dense encoder (e5, bge, ...)")
    parser.add_argument(
        "--retriever_model", default="intfloat/e5-base-v2", help="folder or hub id of the dense encoder"
    )
    parser.add_argument("--faiss_gpu", action="store_true", help="put the FAISS index on all GPUs")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads of the encoder and the index")
    parser.add_argument("--cache_passages", type=int, default=50_000, help="passages kept for repeated queries")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit code: 1 when it cannot start."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _check(arguments)
        listener = _bind(arguments.host, arguments.port)
        service = _load(arguments)
    except SearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    _LOG.info(
        "serving %d passages by %s on http://%s:%d/retrieve", len(service.corpus), service.retriever.name, host, port
    )
    _serve(create_app(service, arguments.topk), listener)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.topk <= MAX_TOPK:
        raise ServerError(f"--topk is {arguments.topk}; it must be between 1 and {MAX_TOPK}")
    for name in ("num_threads", "cache_passages"):
        if getattr(arguments, name) < 1:
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")


def _bind(host: str, port: int) -> socket.socket:
    """Reserve the address before the long load. It refuses connections until the server listens."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise ServerError(
            f"cannot listen on {host}:{port}: {error}; stop what uses it or pass another --port"
        ) from error
    return listener


def _load(arguments: argparse.Namespace) -> RetrievalService:
    """Import the numerical libraries only now: they read their thread counts once, when they are loaded."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(arguments.num_threads)
    from search_r1.search.backends import BackendOptions, load_retriever
    from search_r1.search.corpus import Corpus
    from search_r1.search.service import RetrievalService

    corpus = Corpus(arguments.corpus_path)
    options = BackendOptions(
        name=arguments.retriever_name,
        index_path=arguments.index_path,
        model=arguments.retriever_model,
        gpu=arguments.faiss_gpu,
        num_threads=arguments.num_threads,
    )
    return RetrievalService(load_retriever(options, corpus), corpus, arguments.cache_passages)


def _serve(app: FastAPI, listener: socket.socket) -> None:
    # uvicorn raises the signal again after a clean stop; this handler makes that an exit with code 0
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=10
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        _LOG.info("stopped")


if __name__ == "__main__":
    sys.exit(main())
