"""The retrieval server: one corpus and one index over HTTP.

    python -m search_r1.search.retrieval_server --corpus_path corpus.jsonl --retriever_name bm25

Everything is loaded before the server listens; `/readyz` says 200 once the first query has run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from search_r1.search.app import AppOptions, create_app
from search_r1.search.errors import SearchError, ServerError
from search_r1.search.gate import ServerState
from search_r1.search.metrics import Metrics
from search_r1.search.wire import MAX_TOPK

if TYPE_CHECKING:
    from search_r1.search.service import RetrievalService

_LOG = logging.getLogger(__name__)
_TOKEN_VARIABLE = "RETRIEVAL_AUTH_TOKEN"
_DRAIN_S = 10.0  # how long a stopping server waits for the requests that run
_SWITCH_S = 0.001  # Python lets a busy thread run 5 ms; the event loop should not wait that long for the index


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and those of the server: address, batches, cache, queue, deadline, token."""
    parser = argparse.ArgumentParser(description="Serve passages over HTTP.")
    parser.add_argument("--index_path", help="FAISS file or BM25 folder; BM25 without it is built in memory")
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    parser.add_argument("--topk", type=int, default=3, help="passages a query when the request does not say")
    parser.add_argument("--retriever_name", default="e5", help="bm25, or the family of a dense encoder (e5, bge, ...)")
    parser.add_argument(
        "--retriever_model", default="intfloat/e5-base-v2", help="folder or hub id of the dense encoder"
    )
    parser.add_argument("--faiss_gpu", action="store_true", help="put the FAISS index on all GPUs")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads of the encoder and the index")
    _add_index_arguments(parser)
    _add_server_arguments(parser)
    return parser.parse_args(argv)


def _add_index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dense_engine", default="auto", help="auto, faiss, or matrix (exact, of Flat indexes)")
    parser.add_argument("--search_parameters", default="", help="of a FAISS index, such as nprobe=32 or efSearch=128")
    parser.add_argument("--query_precision", default="auto", help="of the encoder: auto, float32, bfloat16, float16")
    parser.add_argument("--dense_name", help="of --retriever_name hybrid: the family of its dense encoder")
    parser.add_argument("--bm25_index_path", help="of --retriever_name hybrid: the BM25 folder")


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument("--max_batch", type=int, default=128, help="most queries of one search of the index")
    parser.add_argument("--max_wait_ms", type=float, default=1.0, help="how long an idle server gathers a batch")
    parser.add_argument("--max_queue", type=int, default=8192, help="queries that may wait; beyond: HTTP 503")
    parser.add_argument("--cache_size", type=float, default=128, help="MiB of answers kept for repeated queries")
    parser.add_argument("--timeout_s", type=float, default=120, help="longest time of a request; beyond: HTTP 504")
    parser.add_argument(
        "--auth_token", help=f"bearer token that requests must carry; better in the environment: {_TOKEN_VARIABLE}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit code: 1 when it cannot start."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    metrics = Metrics()
    try:
        _check(arguments)
        token = _token(arguments)
        listener = _bind(arguments.host, arguments.port)
        service = _load(arguments, metrics)
    except SearchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    host, port = listener.getsockname()[:2]
    _LOG.info("serving %d passages by %s on http://%s:%d/retrieve", len(service.corpus), service.name, host, port)
    if token is None and not ipaddress.ip_address(host).is_loopback:
        _LOG.warning("%s is open to other machines and there is no --auth_token: everyone may search", host)
    _serve(create_app(service, AppOptions(arguments.topk, arguments.timeout_s, token), metrics), listener)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 1 <= arguments.topk <= MAX_TOPK:
        raise ServerError(f"--topk is {arguments.topk}; it must be between 1 and {MAX_TOPK}")
    for name in ("num_threads", "max_batch", "max_queue"):
        if getattr(arguments, name) < 1:
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    for name in ("max_wait_ms", "cache_size"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be 0 or more")
    if not 0 < arguments.timeout_s < float("inf"):
        raise ServerError(f"--timeout_s is {arguments.timeout_s}; it must be a positive number of seconds")


def _token(arguments: argparse.Namespace) -> str | None:
    """The token of the command line, else of the environment. The message never shows it."""
    token = arguments.auth_token if arguments.auth_token is not None else os.environ.get(_TOKEN_VARIABLE)
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise ServerError(f"--auth_token (or {_TOKEN_VARIABLE}) must be printable ASCII without spaces, not empty")
    return token


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


def _load(arguments: argparse.Namespace, metrics: Metrics) -> RetrievalService:
    """Import the numerical libraries only now: they read their thread counts once, when they are loaded."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(arguments.num_threads)
    from search_r1.search.backends import BackendOptions, load_retriever
    from search_r1.search.corpus import Corpus
    from search_r1.search.service import RetrievalService, ServiceOptions

    corpus = Corpus(arguments.corpus_path)
    options = BackendOptions(
        name=arguments.retriever_name,
        index_path=arguments.index_path,
        model=arguments.retriever_model,
        gpu=arguments.faiss_gpu,
        num_threads=arguments.num_threads,
        engine=arguments.dense_engine,
        search_parameters=arguments.search_parameters,
        query_precision=arguments.query_precision,
        dense_name=arguments.dense_name,
        bm25_index_path=arguments.bm25_index_path,
    )
    limits = ServiceOptions(arguments.max_batch, arguments.max_wait_ms, arguments.max_queue, arguments.cache_size)
    return RetrievalService(load_retriever(options, corpus), corpus, limits, metrics)


def _serve(app: FastAPI, listener: socket.socket) -> None:
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what is loaded stays: no later collection walks through it
    # uvicorn raises the signal again after a clean stop; this handler makes that an exit with code 0
    signal.signal(signal.SIGTERM, lambda *_: None)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=75, timeout_graceful_shutdown=1
    )
    try:
        DrainingServer(config, app.state.server).run(sockets=[listener])
    except KeyboardInterrupt:
        _LOG.info("stopped")


class DrainingServer(uvicorn.Server):
    """On the first signal it still listens, to say 503, until the requests that run are answered."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    async def main_loop(self) -> None:
        """uvicorn's, which ends at the first signal, and then the wait for what runs."""
        await super().main_loop()
        self._state.draining = True
        end = time.monotonic() + _DRAIN_S
        while self._state.running and not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
