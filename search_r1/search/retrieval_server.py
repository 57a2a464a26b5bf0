"""The retrieval server: one corpus and one index, or an online engine, over HTTP.

    .venv/bin/python -m search_r1.search.retrieval_server --corpus_path corpus.jsonl --retriever_name bm25

Everything is loaded before the server listens; `/readyz` replies 200 once the first query has run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from search_r1.errors import ServerError
from search_r1.http.arguments import add_serving_arguments
from search_r1.http.gate import Metrics
from search_r1.http.process import run_server
from search_r1.search.library_threads import prepare_libraries
from search_r1.search.mcp_server.tool import sdk_module
from search_r1.search.online_arguments import ENGINES, add_online_arguments, load_engine
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.app import AppOptions
from search_r1.search.server.wire import MAX_TOPK

if TYPE_CHECKING:
    from fastapi import FastAPI

    from search_r1.search.server.retrieval_service import RetrievalService
    from search_r1.search.server.source_interface import Source


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and those of the server: address, batches, cache, queue, deadline, token."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.retrieval_server", description="Serve passages over HTTP."
    )
    parser.add_argument("--topk", type=int, default=3, help="passages per query when the request does not say")
    parser.add_argument(
        "--workers", type=int, default=1, help="only 1 is accepted; for more processes see docs/retrieval.md#replicas"
    )
    parser.add_argument("--mcp", action="store_true", help="also offer the search as a tool to MCP clients, at /mcp")
    add_retriever_arguments(parser)
    add_online_arguments(parser)
    add_serving_arguments(parser)
    return parser.parse_args(argv)


def add_retriever_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `load_service` reads: the corpus, the index, and the limits of batches, queue and cache."""
    # what is searched, and with what
    parser.add_argument("--index_path", help="FAISS file or BM25 folder; without it, a BM25 index is built in memory")
    parser.add_argument(
        "--corpus_path", help="passages, .jsonl or .jsonl.gz; required for every retriever but online engines"
    )
    parser.add_argument(
        "--retriever_name",
        default="e5",
        help="bm25, the family of a dense encoder (e5, bge, ...), hybrid, or an online engine",
    )
    parser.add_argument(
        "--retriever_model", default="intfloat/e5-base-v2", help="folder or hub id of the dense encoder"
    )
    # how a dense index computes
    parser.add_argument("--faiss_gpu", action="store_true", help="split the index over all visible GPUs")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads of the encoder and the index")
    parser.add_argument(
        "--dense_engine", default="auto", help="auto, faiss, or matrix (exact search, for Flat indexes)"
    )
    parser.add_argument(
        "--search_parameters", default="", help="search parameters of a FAISS index, such as nprobe=32 or efSearch=128"
    )
    parser.add_argument(
        "--query_precision", default="auto", help="precision of the query encoder: auto, float32, bfloat16, float16"
    )
    # for hybrid
    parser.add_argument("--dense_name", help="for --retriever_name hybrid: the family of the dense encoder")
    parser.add_argument("--bm25_index_path", help="for --retriever_name hybrid: the BM25 folder")
    # the limits of batches, queue and cache
    parser.add_argument(
        "--max_batch", type=int, default=256, help="maximum number of queries in one search of the index"
    )
    parser.add_argument(
        "--max_wait_ms",
        type=float,
        default=1.0,
        help="how long an idle server waits for more queries before it searches, in milliseconds",
    )
    parser.add_argument(
        "--max_queue", type=int, default=8192, help="queries that may wait; when the queue is full, HTTP 503"
    )
    parser.add_argument(
        "--cache_size", type=float, default=128, help="size of the result cache for repeated queries, in MiB"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)
    return run_server(arguments, lambda metrics, token: _load(arguments, metrics, token))


def _load(arguments: argparse.Namespace, metrics: Metrics, token: str | None) -> tuple[str, FastAPI]:
    """Load everything: returns a description of what is served, and its app. Raises a `SearchError`."""
    # Loading may take minutes, so everything that can be checked without the index is checked first.
    check_topk("--topk", arguments.topk)
    if arguments.workers != 1:
        raise ServerError(
            f"--workers is {arguments.workers}, but a server is one process; to use more, start several servers, each "
            "on its own --port, and give the client all addresses with commas between: "
            "\"retriever.url='http://host:8000/retrieve,http://host:8001/retrieve'\" (docs/retrieval.md)"
        )
    if arguments.mcp:
        sdk_module("mcp.server")  # before the long load
    check_retriever_arguments(arguments)
    source = load_source(arguments, metrics)
    what = source.name if source.num_passages is None else f"{source.num_passages} passages by {source.name}"
    return what, create_app(source, AppOptions(arguments.topk, arguments.timeout_s, token, arguments.mcp), metrics)


def check_topk(name: str, topk: int) -> None:
    """Raises `ServerError` if `topk`, the value of the argument `name`, is out of range."""
    if not 1 <= topk <= MAX_TOPK:
        raise ServerError(f"{name} is {topk}; it must be between 1 and {MAX_TOPK}")


def check_retriever_arguments(arguments: argparse.Namespace) -> None:
    """Raises `ServerError` for an invalid value."""
    for name in ("num_threads", "max_batch", "max_queue"):
        if getattr(arguments, name) < 1:
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be at least 1")
    for name in ("max_wait_ms", "cache_size"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be 0 or more")


def load_source(arguments: argparse.Namespace, metrics: Metrics) -> Source:
    """The source for `--retriever_name`: an online engine, or a corpus and its index. Raises a `SearchError`."""
    if arguments.retriever_name.lower() in ENGINES:
        return load_engine(arguments)
    return load_service(arguments, metrics)


def load_service(arguments: argparse.Namespace, metrics: Metrics) -> RetrievalService:
    """A source made from the corpus and the index of `add_retriever_arguments`. Raises a `SearchError`.

    Imports the numerical libraries only here: online engines do not need them.
    """
    if not arguments.corpus_path:
        raise ServerError(
            f"--retriever_name {arguments.retriever_name} needs --corpus_path, a .jsonl file of passages; without one "
            f"there are the online engines {', '.join(ENGINES)}"
        )
    prepare_libraries(arguments.num_threads)
    from search_r1.search.corpus import Corpus
    from search_r1.search.retriever import RetrieverOptions
    from search_r1.search.retriever_loading import load_retriever
    from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions

    # The corpus comes first: an index is checked against it.
    corpus = Corpus(arguments.corpus_path)
    options = RetrieverOptions(
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


if __name__ == "__main__":
    sys.exit(main())
