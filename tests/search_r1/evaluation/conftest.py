"""A real retrieval server over a few passages, and a model server that answers as it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluation_world import PASSAGES, ModelServer

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in PASSAGES.items()]
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def retriever_url(corpus: Path) -> Iterator[str]:
    """The address of a BM25 server over `PASSAGES`."""
    log = corpus.with_suffix(".log")
    command = [sys.executable, "-m", "search_r1.search.retrieval_server", "--retriever_name", "bm25", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--corpus_path", str(corpus)], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
    try:
        yield _address(server, log)
    finally:
        server.terminate()
        server.wait(timeout=20)


def _address(server: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(900):
        assert server.poll() is None, f"the server ended with {server.returncode}:\n{log.read_text()}"
        found = [word for word in log.read_text().split() if word.startswith("http://") and word.endswith("/retrieve")]
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    server = ModelServer()
    yield server
    server.close()
