"""A real retrieval server over a few passages, and a model server that answers as it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from evaluation_world import PASSAGES, ModelServer


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in PASSAGES.items()]
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def retriever_url(corpus: Path, start_retriever: Callable[..., str]) -> str:
    """The address of a BM25 server over `PASSAGES`."""
    return start_retriever(corpus)


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    server = ModelServer()
    yield server
    server.close()
