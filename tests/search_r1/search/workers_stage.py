"""A program: a BM25 service of several processes whose searches wait while a file exists."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from search_r1.http.metrics import Metrics
from search_r1.http.process import bind
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.retriever import Hit
from search_r1.search.server.app import AppOptions
from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions
from search_r1.search.workers.shared_address import SharedAddress
from search_r1.search.workers.supervisor import serve_workers


class HeldBm25:
    """BM25 that waits for `hold` to go before each search; the query "poison" raises."""

    name = "bm25"

    def __init__(self, corpus: Corpus, hold: Path) -> None:
        self._index = Bm25Retriever.build(corpus)
        self._hold = hold

    def __len__(self) -> int:
        return len(self._index)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        while self._hold.exists():
            time.sleep(0.005)
        if "poison" in queries:
            raise RuntimeError("a poisoned query")
        return self._index.search(queries, k)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--corpus_path", type=Path, required=True)
    parser.add_argument("--hold", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max_queue", type=int, default=8192)
    arguments = parser.parse_args()
    corpus, metrics = Corpus(arguments.corpus_path), Metrics()
    limits = ServiceOptions(max_wait_ms=0.0, max_queue=arguments.max_queue)
    service = RetrievalService(HeldBm25(corpus, arguments.hold), corpus, limits, metrics)
    address = SharedAddress(bind("127.0.0.1", arguments.port))
    serve_workers(service, AppOptions(topk=2, timeout_s=60.0), metrics, address, arguments.workers)


if __name__ == "__main__":
    main()
