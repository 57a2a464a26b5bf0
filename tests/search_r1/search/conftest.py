"""Servers in this process and in others, and real files, for the retrieval tests."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
import uvicorn
from search_corpora import ROWS, write_rows
from search_servers import PATIENCE_S, address, listen, served, wait_until

from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus

_ROOT = Path(__file__).resolve().parents[3]
_DATA = _ROOT.parent / "shared" / "data"

BuiltOnce = Callable[[str, Callable[[Path], object]], Path]
Serve = Callable[..., str]
StartProcess = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "corpus.jsonl", *ROWS)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small untrained BERT."""
    from search_encoders import save_bert  # loads torch

    return save_bert(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def server_environment() -> dict[str, str]:
    """The environment of server processes: one thread, no network, this checkout first."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def wiki_mini(built_once: BuiltOnce) -> Path:
    """Real Wikipedia passages, decompressed, or a skip."""
    packed = _shared_data("wiki-mini.jsonl.gz")
    name = "corpus.jsonl"
    return built_once("wiki", lambda folder: (folder / name).write_bytes(gzip.decompress(packed.read_bytes()))) / name


@pytest.fixture(scope="session")
def wiki_index(wiki_mini: Path, built_once: BuiltOnce) -> Path:
    """The BM25 index of these passages."""
    return built_once("wiki_bm25", lambda folder: Bm25Retriever.build(Corpus(wiki_mini)).save(folder))


@pytest.fixture
def nq_questions() -> list[dict]:
    """Real questions: rows with `question` and `golden_answers`."""
    with _shared_data("qa/nq/test.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(*arguments, module=..., **variables) -> base URL`: see `served`. The test ends them."""
    with ExitStack() as servers:
        yield lambda *arguments, **more: servers.enter_context(served(*arguments, **more))


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A BM25 server over `ROWS`, index built in memory, topk 2 by default."""
    corpus = write_rows(tmp_path_factory.mktemp("server") / "corpus.jsonl", *ROWS)
    with served("--corpus_path", str(corpus), "--retriever_name", "bm25", "--topk", "2") as url:
        yield url


@pytest.fixture
def start_process(server_environment: dict[str, str]) -> Iterator[StartProcess]:
    """Starts a command that becomes a server on the port: `start_process(command, port, **variables) -> process`.

    It is ready then, and ends with the test.
    """
    processes: list[subprocess.Popen[str]] = []

    def start(command: list[str], port: int, cwd: Path = _ROOT, **variables: str) -> subprocess.Popen[str]:
        environment = server_environment | variables
        process = subprocess.Popen(command, cwd=cwd, text=True, stderr=subprocess.PIPE, env=environment)
        processes.append(process)
        _wait_until_ready(f"http://127.0.0.1:{port}", process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def run_app() -> Iterator[Callable[..., str]]:
    """Runs an ASGI app on a real port in a thread: `run_app(app, delay_s=0) -> base URL`.

    Until `delay_s` is over the port is taken but refuses connections, as that of a server that is loading.
    """
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any, delay_s: float = 0.0) -> str:
        listener = listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=60))
        thread = threading.Timer(delay_s, server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread))
        if not delay_s:
            wait_until(lambda: server.started)
        return address(listener)

    yield start
    for server, _ in running:
        server.force_exit = server.should_exit = True
    for _, thread in running:
        thread.join(timeout=PATIENCE_S)


def _shared_data(name: str) -> Path:
    path = _DATA / name
    if not path.is_file():
        pytest.skip(f"the real data file {name} is not beside the repository")
    return path


def _wait_until_ready(url: str, process: subprocess.Popen[str], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}: {process.communicate()[1]}")
        try:
            requests.get(f"{url}/readyz", timeout=10).raise_for_status()
            return
        except requests.RequestException:  # it does not listen yet, or its first query has not run, or it is slow
            time.sleep(0.05)
    pytest.fail(f"{url} was not ready in {seconds} s")
