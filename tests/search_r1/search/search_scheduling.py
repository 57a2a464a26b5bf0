"""A retriever that shows what it is asked and answers when the test says so, behind the real server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from search_servers import PATIENCE_S, wait_until

from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.retriever import Hit
from search_r1.search.server.app import AppOptions
from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions


class Gate:
    """Whoever comes to it waits until the test lets it pass."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)
        self._open = False

    def wait_at_the_gate(self) -> None:
        assert self._open or self._passes.acquire(timeout=PATIENCE_S)

    def let_pass(self, number: int = 1) -> None:
        self._passes.release(number)

    def open(self) -> None:
        """From now on nothing waits."""
        self._open = True
        self._passes.release()


class GatedRetriever(Gate):
    """The query "x 7" finds row 7 % rows with score 7; "poison" raises; "nan" has no finite score.

    A search waits at the gate; `batches` are the ones that came so far.
    """

    name = "gated"

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows
        self.batches: list[list[str]] = []
        self.ks: list[int] = []

    def __len__(self) -> int:
        return self._num_rows

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        self.ks.append(k)
        self.wait_at_the_gate()
        if "poison" in queries:
            raise RuntimeError("a poisoned query")
        return [[self._hit(query)] for query in queries]

    def _hit(self, query: str) -> Hit:
        if query == "nan":
            return Hit(0, float("nan"))
        number = int(query.split()[-1])
        return Hit(number % self._num_rows, float(number))


class Stage:
    """A service over a `GatedRetriever` and its address."""

    def __init__(self, url: str, retriever: GatedRetriever, service: RetrievalService) -> None:
        self.url = url
        self.retriever = retriever
        self.service = service

    def ask(self, *queries: str, topk: int = 1, headers: dict[str, str] | None = None) -> requests.Response:
        body = {"queries": list(queries), "topk": topk, "return_scores": True}
        return requests.post(f"{self.url}/retrieve", json=body, headers=headers, timeout=PATIENCE_S)

    @contextmanager
    def client_that_leaves(self, *queries: str) -> Iterator[None]:
        """Asks, and hangs up at the end."""
        gone, address = self.value("retrieval_gone_total"), urlsplit(self.url)
        body = json.dumps({"queries": queries, "topk": 1}).encode()
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as client:
            client.sendall(
                b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            yield
        wait_until(lambda: self.value("retrieval_gone_total") == gone + 1)

    def value(self, metric: str, **labels: str) -> float | None:
        return self.service.metrics.registry.get_sample_value(metric, labels)

    def wait_for_queue(self, size: int) -> None:
        wait_until(lambda: self.value("retrieval_queue_queries") == size)

    def wait_for_batches(self, number: int) -> None:
        wait_until(lambda: len(self.retriever.batches) == number)


def scores(reply: requests.Response) -> list[float]:
    """The scores of a reply to queries with one hit each."""
    assert reply.status_code == 200, reply.text
    return [hits[0]["score"] for hits in reply.json()["result"]]


@contextmanager
def staged(
    run_app: Callable[..., str], corpus_file: Path, timeout_s: float = PATIENCE_S, **limits: Any
) -> Iterator[Stage]:
    """A server that takes what is there at once, without a warm-up query."""
    corpus = Corpus(corpus_file)
    retriever = GatedRetriever(len(corpus))
    service = RetrievalService(retriever, corpus, ServiceOptions(**{"max_wait_ms": 0.0} | limits))
    options = AppOptions(timeout_s=timeout_s)
    try:
        yield Stage(run_app(create_app(service, options, service.metrics)), retriever, service)
    finally:
        retriever.open()
        service.close()
