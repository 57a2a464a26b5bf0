"""ASGI apps on real ports, in threads of this process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.retrieval_service import RetrievalService


@contextmanager
def served_app(app: Any, port: int = 0, finishes: bool = True) -> Iterator[str]:
    """The address of `app`, which at the end `finishes` what it was asked or breaks it off."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive() or server.started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.force_exit = not finishes
        server.should_exit = True
        thread.join(timeout=60)
        listener.close()


@contextmanager
def served_corpus(corpus: Path, port: int = 0) -> Iterator[str]:
    """The address of BM25 over `corpus`, with its path: what `retriever.url` is."""
    rows = Corpus(corpus)
    with served_app(create_app(RetrievalService(Bm25Retriever.build(rows), rows)), port) as url:
        yield f"{url}/retrieve"


def write_passages(path: Path, passages: Mapping[str, str]) -> Path:
    """A corpus: contents by id."""
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in passages.items()]
    path.write_text("".join(rows), encoding="utf-8")
    return path
