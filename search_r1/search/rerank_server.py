"""The reranking server: a cross-encoder over HTTP, for passages that come with the request.

    .venv/bin/python -m search_r1.search.rerank_server --rerank_model_name_or_path cross-encoder/ms-marco-MiniLM-L12-v2

Everything is loaded before the server listens; `/readyz` replies 200 once the first pair is scored.
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
from search_r1.search.rerank.loading import MAX_DOCUMENTS, add_reranker_arguments, load_reranker
from search_r1.search.server.app import AppOptions, create_app_of


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The published arguments, and those of the server: address, queue, cache, deadline, token."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.rerank_server", description="Rerank passages over HTTP."
    )
    parser.add_argument("--reranker_type", default="sentence_transformer", choices=["sentence_transformer"])
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument(
        "--max_wait_ms",
        type=float,
        default=1.0,
        help="how long an idle server waits for more pairs before it scores, in milliseconds",
    )
    add_reranker_arguments(parser, "--rerank_topk", "--rerank_model_name_or_path", "--batch_size", "--max_length")
    add_serving_arguments(parser, port=6980)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Load, then serve until SIGTERM or Ctrl-C. Returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)

    def build(metrics: Metrics, token: str | None) -> tuple[str, FastAPI]:
        # What is wrong with the arguments is said before torch and the model are loaded.
        if not 1 <= arguments.rerank_topk <= MAX_DOCUMENTS:
            raise ServerError(f"--rerank_topk is {arguments.rerank_topk}; it must be between 1 and {MAX_DOCUMENTS}")
        if arguments.num_threads < 1:
            raise ServerError(f"--num_threads is {arguments.num_threads}; it must be at least 1")
        from search_r1.search.rerank.routes import rerank_router  # loads torch

        model, options = (
            arguments.rerank_model_name_or_path,
            AppOptions(arguments.rerank_topk, arguments.timeout_s, token),
        )
        reranker = load_reranker(arguments, model, arguments.max_length, arguments.batch_size, metrics)
        return reranker.name, create_app_of(reranker, rerank_router(reranker, options), options, metrics)

    return run_server(arguments, build, "/rerank")


if __name__ == "__main__":
    sys.exit(main())
