"""A retrieval server over a few passages, and the agent's real search environment in front of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from chaos_world import PASSAGES
from e2e_world import free_port
from killed_runs import Runs
from training_process import TrainingProcess

from search_r1.http.gate import Metrics
from search_r1.search.retrieval_app import create_app
from search_r1.search.retrieval_server import load_service, parse_arguments


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    while TrainingProcess.started:
        TrainingProcess.started.pop().kill()


@pytest.fixture(scope="session")
def library_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a BM25 server over `PASSAGES`: the real one, in a thread of this process."""
    corpus = tmp_path_factory.mktemp("library") / "corpus.jsonl"
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in PASSAGES.items()]
    corpus.write_text("".join(rows))
    arguments = parse_arguments(["--retriever_name", "bm25", "--corpus_path", str(corpus)])
    port = free_port()
    app = create_app(load_service(arguments, Metrics()))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and is_ready(port)):  # its first query takes longer than some deadlines
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/retrieve"
    server.should_exit = True
    thread.join(30)


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60).close()
        return True
    return False


@pytest.fixture(scope="session")
def runs(
    tinywiki: Path, policy: Path, tinywiki_url: str, built_once: Callable[[str, Callable[[Path], None]], Path]
) -> Runs:
    return Runs(tinywiki, policy, tinywiki_url, built_once)
