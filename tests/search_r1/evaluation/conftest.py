"""A real retrieval server over a few passages, and a model server that answers as it is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluation_world import PASSAGES, ModelServer
from served_app import served_corpus, write_passages


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_passages(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES)


@pytest.fixture(scope="session")
def retriever_url(corpus: Path) -> Iterator[str]:
    with served_corpus(corpus) as url:
        yield url


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    server = ModelServer()
    yield server
    server.close()
