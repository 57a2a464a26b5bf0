"""The arguments that the two reranking programs share, and the reranker built from them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from search_r1.errors import ServerError
from search_r1.http.gate import Metrics
from search_r1.search.library_threads import prepare_libraries

if TYPE_CHECKING:
    from search_r1.search.rerank.reranker import Reranker

MODEL = "cross-encoder/ms-marco-MiniLM-L12-v2"
MAX_DOCUMENTS = 1000  # of a query
_PASSES_A_BATCH = 4  # forward passes of one batch: enough pairs to sort by length, few enough to take turns


def add_reranker_arguments(
    parser: argparse.ArgumentParser, topk: str, model: str, batch_size: str, max_length: str
) -> None:
    """Add the flags whose names differ between the two programs, and the limits of the reranker's queue and cache."""
    parser.add_argument(topk, type=int, default=3, help="passages per query when the request does not say")
    parser.add_argument(model, default=MODEL, help="folder or hub id of the cross-encoder")
    parser.add_argument(batch_size, type=int, default=32, help="maximum number of pairs in one forward pass")
    parser.add_argument(max_length, type=int, default=512, help="maximum tokens of a query and a passage together")
    parser.add_argument("--reranker_precision", default="auto", help="auto, float32, bfloat16, float16")
    parser.add_argument(
        "--reranker_max_queue", type=int, default=65_536, help="pairs that may wait; when the queue is full, HTTP 503"
    )
    parser.add_argument(
        "--reranker_cache_size", type=float, default=32, help="size of the score cache for repeated pairs, in MiB"
    )


def load_reranker(
    arguments: argparse.Namespace, model: str, max_length: int, batch_size: int, metrics: Metrics
) -> Reranker:
    """The reranker with the limits of `add_reranker_arguments`, `--num_threads` and `--max_wait_ms`.

    Raises `ServerError` or `EncoderError`.
    """
    # Check all values before torch is loaded.
    for name, value in (
        ("max_length", max_length),
        ("batch_size", batch_size),
        ("reranker_max_queue", arguments.reranker_max_queue),
    ):
        if value < 1:
            raise ServerError(f"the argument {name} is {value}; it must be at least 1")
    for name in ("max_wait_ms", "reranker_cache_size"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ServerError(f"--{name} is {getattr(arguments, name)}; it must be 0 or more")
    # The threads of the libraries must be set before they are imported.
    prepare_libraries(arguments.num_threads)
    from search_r1.search.rerank.cross_encoder import CrossEncoder, CrossEncoderOptions  # loads torch
    from search_r1.search.rerank.reranker import Reranker, RerankLimits

    options = CrossEncoderOptions(model, max_length, batch_size, arguments.reranker_precision, arguments.num_threads)
    limits = RerankLimits(
        batch_size * _PASSES_A_BATCH,
        arguments.max_wait_ms,
        arguments.reranker_max_queue,
        arguments.reranker_cache_size,
    )
    return Reranker(CrossEncoder(options), limits, metrics)
