"""The retrieval server with a reranker: an index finds candidates, a cross-encoder chooses among them.

    .venv/bin/python -m search_r1.search.retrieval_rerank_server --corpus_path corpus.jsonl --retriever_name bm25

Everything is loaded before the server listens; `/readyz` replies 200 once the first query has run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fastapi import FastAPI

from search_r1.errors import ServerError
from search_r1.http.arguments import add_serving_arguments
from search_r1.http.gate import Metrics
from search_r1.http.process import run_server
from search_r1.search.rerank.loading import add_reranker_arguments, load_reranker
from search_r1.search.retrieval_server import (
    add_retriever_arguments,
    check_retriever_arguments,
    check_topk,
    load_service,
)
from search_r1.search.server.app import AppOptions, create_app_of
from search_r1.search.server.routes import page_router


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and those of the retrieval server."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.retrieval_rerank_server", description="Serve reranked passages over HTTP."
    )
    parser.add_argument(
        "--retrieval_topk", type=int, default=10, help="candidates per query when the request does not say"
    )
    add_reranker_arguments(
        parser, "--reranking_topk", "--reranker_model", "--reranker_batch_size", "--reranker_max_length"
    )
    add_retriever_arguments(parser)
    add_serving_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)

    def build(metrics: Metrics, token: str | None) -> tuple[str, FastAPI]:
        _check(arguments)
        service = load_service(arguments, metrics)
        from search_r1.search.rerank.reranker import RerankedSource  # loads torch
        from search_r1.search.rerank.routes import reranked_router

        reranker = load_reranker(
            arguments,
            arguments.reranker_model,
            arguments.reranker_max_length,
            arguments.reranker_batch_size,
            metrics,
        )
        # Searches go through the reranker. Only the service below it has the corpus, so that one answers `/page`.
        options = AppOptions(arguments.reranking_topk, arguments.timeout_s, token)
        source = RerankedSource(service, reranker, arguments.retrieval_topk)
        router = reranked_router(source, reranker, options)
        router.include_router(page_router(service, options))
        return f"{len(service.corpus)} passages by {source.name}", create_app_of(source, router, options, metrics)

    return run_server(arguments, build)


def _check(arguments: argparse.Namespace) -> None:
    check_topk("--retrieval_topk", arguments.retrieval_topk)
    check_topk("--reranking_topk", arguments.reranking_topk)
    if arguments.retrieval_topk < arguments.reranking_topk:
        raise ServerError(
            f"--retrieval_topk is {arguments.retrieval_topk}; it must be at least --reranking_topk, "
            f"{arguments.reranking_topk}"
        )
    check_retriever_arguments(arguments)


if __name__ == "__main__":
    sys.exit(main())
