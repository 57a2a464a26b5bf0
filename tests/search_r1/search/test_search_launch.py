"""Starting and stopping: the launch script, bad arguments, a port in use, signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_server(server_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a server that is expected to end by itself."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "search_r1.search.retrieval_server", *arguments]
        return subprocess.run(command, cwd=_ROOT, env=server_environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def launch(server_environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts the launch script from another folder."""

    def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = ["bash", str(_ROOT / "retrieval_launch.sh"), *arguments]
        return subprocess.Popen(command, env=server_environment | variables, cwd="/", stderr=subprocess.PIPE, text=True)

    return start


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_launch_script_serves_and_stops_cleanly(
    launch, wait_until_ready, free_port, corpus_file: Path, stop: signal.Signals
) -> None:
    port = free_port()
    process = launch("--topk", "1", CORPUS_PATH=str(corpus_file), PORT=str(port))
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        reply = requests.post(f"http://127.0.0.1:{port}/retrieve", json={"queries": ["river Morn"]}, timeout=10)
        assert [hit["id"] for hit in reply.json()["result"][0]] == ["p20"]  # --topk 1 overrides TOPK
    finally:
        process.send_signal(stop)
        _, log = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"serving 5 passages by bm25 on http://127.0.0.1:{port}/retrieve" in log
    assert "Traceback" not in log
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/healthz", timeout=2)


def test_launch_script_without_a_corpus_says_what_to_do(launch, tmp_path: Path) -> None:
    process = launch(CORPUS_PATH=str(tmp_path / "none.jsonl"))
    _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert log.startswith(f"error: corpus file {tmp_path}/none.jsonl does not exist; set CORPUS_PATH")


def test_port_in_use_is_one_line_before_anything_loads(run_server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run_server("--corpus_path", str(tmp_path / "never_read.jsonl"), "--port", str(port))
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"error: cannot listen on 127.0.0.1:{port}" in ended.stderr and "--port" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--retriever_name", "bm25", "--topk", "0"], "--topk is 0; it must be between 1 and 100"),
        (["--retriever_name", "bm25", "--num_threads", "0"], "--num_threads is 0; it must be at least 1"),
        (["--retriever_name", "e5"], "dense retriever 'e5' needs --index_path"),
        (["--retriever_name", "e5", "--index_path", "/nowhere/e5_Flat.index"], "/nowhere/e5_Flat.index does not exist"),
        (["--retriever_name", "bm25", "--index_path", "/nowhere"], "/nowhere is not a BM25 index"),
        (["--retriever_name", "bm25", "--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
    ],
)
def test_bad_arguments_are_one_line(run_server, corpus_file: Path, arguments: list[str], message: str) -> None:
    ended = run_server("--corpus_path", str(corpus_file), "--port", "0", *arguments)
    assert ended.returncode == 1
    assert message in ended.stderr and "Traceback" not in ended.stderr


def test_malformed_corpus_stops_the_start(run_server, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    ended = run_server("--corpus_path", str(path), "--retriever_name", "bm25", "--port", "0")
    assert ended.returncode == 1 and f"{path}, line 2: no 'contents'" in ended.stderr


def test_bm25_loads_no_torch(server_environment, corpus_file: Path) -> None:
    code = (
        "import sys; from search_r1.search.backends import *; from search_r1.search.corpus import Corpus; "
        f"import search_r1.search.client, search_r1.search.index_builder, search_r1.search.retrieval_server; "
        f"load_retriever(BackendOptions('bm25'), Corpus({str(corpus_file)!r})); "
        "assert not {'torch', 'ray', 'verl', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=server_environment, check=True, timeout=60)
