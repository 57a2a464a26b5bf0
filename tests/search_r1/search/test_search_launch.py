"""Starting and stopping: the launch script, bad arguments, a port in use, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from documented_commands import Checkout, parse
from e2e_world import free_port
from search_encoders import encoder, save_bert
from search_engines import Engine

from search_r1.search import retrieval_server
from search_r1.search.corpus import Corpus

_ROOT = Path(__file__).resolve().parents[3]
_EXAMPLES = "example/retriever/retrieval_launch"


@pytest.fixture
def run_server(server_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a server that is expected to end by itself."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "search_r1.search.retrieval_server", *arguments]
        return subprocess.run(command, cwd=_ROOT, env=server_environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.fixture
def launch(server_environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts a launch script from another folder."""

    def start(
        *arguments: str, script: str = "retrieval_launch.sh", cwd: Path = Path("/"), **variables: str
    ) -> subprocess.Popen[str]:
        command = ["bash", str(_ROOT / script), *arguments]
        environment = {name: value for name, value in server_environment.items() if name != "PYTHONPATH"} | variables
        return subprocess.Popen(command, env=environment, cwd=cwd, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def ask(launch, wait_until_ready) -> Callable[..., list[dict]]:
    """What the server of a launch script finds: `ask(query, *arguments, script=..., **variables)`."""

    def find(query: str, *arguments: str, **variables: Any) -> list[dict]:
        url = f"http://127.0.0.1:{free_port()}"
        process = launch("--port", url.rpartition(":")[2], *arguments, **variables)
        try:
            wait_until_ready(url, process)
            reply = requests.post(f"{url}/retrieve", json={"queries": [query]}, timeout=120)
            return reply.json()["result"][0]
        finally:
            process.terminate()
            process.communicate(timeout=120)

    return find


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_launch_script_serves_and_stops_cleanly(
    launch, wait_until_ready, corpus_file: Path, stop: signal.Signals
) -> None:
    port = free_port()
    process = launch("--topk", "1", CORPUS_PATH=str(corpus_file), PORT=str(port))
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", process)
        reply = requests.post(f"http://127.0.0.1:{port}/retrieve", json={"queries": ["river Morn"]}, timeout=60)
        assert [hit["id"] for hit in reply.json()["result"][0]] == ["p20"]  # --topk 1 overrides TOPK
    finally:
        process.send_signal(stop)
        _, log = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"serving 5 passages by bm25 on http://127.0.0.1:{port}/retrieve" in log
    assert "Traceback" not in log
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/healthz", timeout=2)


def test_launch_script_without_a_corpus_says_what_to_do(launch, tmp_path: Path) -> None:
    process = launch(CORPUS_PATH=str(tmp_path / "none.jsonl"))
    _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert log.startswith(f"error: corpus file {tmp_path}/none.jsonl does not exist; set CORPUS_PATH")


def test_published_bm25_script_from_a_folder_that_has_a_search_r1_too(
    ask, launch, corpus_file: Path, tmp_path: Path
) -> None:
    """Paths are the caller's, the code is that of the script."""
    (tmp_path / "search_r1").mkdir()
    (tmp_path / "search_r1" / "__init__.py").write_text("raise ImportError('the wrong checkout')")
    settings = {"corpus_file": corpus_file.name, "save_dir": "made", "retriever_name": "bm25"}
    arguments = ("--bm25_k1", "1.2", "--bm25_b", "0.75")
    build = launch(*arguments, script="search_r1/search/build_index.sh", cwd=tmp_path, **settings)
    assert build.wait(timeout=120) == 0, build.communicate()[1]
    manifest = json.loads((tmp_path / "made" / "bm25" / "manifest.json").read_text())
    assert (manifest["k1"], manifest["b"]) == (1.2, 0.75)
    corpus_file.rename(tmp_path / "made" / "wiki-18.jsonl")
    script = f"{_EXAMPLES}_bm25.sh"
    assert [hit["id"] for hit in ask("river Morn", script=script, cwd=tmp_path, file_path="made")] == ["p20", "p10"]
    again = ask("river Morn", "--topk", "1", script=script, cwd=tmp_path, file_path="made")
    assert [hit["id"] for hit in again] == ["p20"]


def test_published_dense_scripts_build_and_serve(ask, launch, corpus_file: Path, tmp_path: Path) -> None:
    model = save_bert(tmp_path / "model")
    (tmp_path / "wiki-18.jsonl").write_bytes(corpus_file.read_bytes())
    settings = {"corpus_file": "wiki-18.jsonl", "save_dir": ".", "retriever_model": "model"}
    build = launch("--faiss_type", "HNSW64", script="search_r1/search/build_index.sh", cwd=tmp_path, **settings)
    assert build.wait(timeout=300) == 0, build.communicate()[1]
    made = json.loads((tmp_path / "e5_HNSW64.index.json").read_text())
    assert (made["pooling"], made["max_length"], made["faiss_type"]) == ("mean", 256, "HNSW64")
    assert (tmp_path / "emb_e5.memmap").stat().st_size == 5 * 32 * 4
    settings = {"file_path": str(tmp_path), "retriever_path": str(model)}
    found = ask("river morn", script=f"{_EXAMPLES}_ann.sh", **settings)
    passages, both = list(Corpus(corpus_file)), encoder(model)
    vectors = both.encode_passages([passage["contents"] for passage in passages])
    best = (-vectors @ both.encode_queries(["river morn"])[0]).argsort()
    assert [hit["id"] for hit in found] == [passages[row]["id"] for row in best[:3]]


def test_published_hierarchical_script_passes_both_stages_on(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    (checkout.folder / "wiki").mkdir()
    for name in ("wiki-18.jsonl", "e5_Flat.index"):
        (checkout.folder / "wiki" / name).touch()
    line = "file_path=wiki reranker_path=org/x bash example/retriever/retrieval_launch_hierarchical.sh --faiss_gpu"
    [call] = checkout.rehearse(next(parse(line)))
    assert call.words == (
        *("python3", "-m", "search_r1.search.retrieval_rerank_server"),
        *("--index_path", "wiki/e5_Flat.index", "--corpus_path", "wiki/wiki-18.jsonl", "--retrieval_topk", "10"),
        *("--retriever_name", "e5", "--retriever_model", "intfloat/e5-base-v2"),
        *("--reranking_topk", "3", "--reranker_model", "org/x", "--reranker_batch_size", "32", "--faiss_gpu"),
    )


def test_published_scripts_of_online_engines(ask, run_app) -> None:
    google, serpapi = Engine("google"), Engine("serpapi")
    found = ask(
        *("lune", "--online_endpoint", f"{run_app(google.app)}/engine"),
        **{"script": f"{_EXAMPLES}_google.sh", "api_key": "a-google-key", "cse_id": "engine 1"},
    )
    assert [hit["source"] for hit in found] == ["google"] * 4  # topk 5, and the engine has four pages
    assert google.fields[0] == {"q": "lune", "num": "10", "cx": "engine 1", "key": "a-google-key"}
    variables = {"serp_api_key": "a-serp-key", "serp_engine": "bing", "search_url": f"{run_app(serpapi.app)}/engine"}
    found = ask("lune", script=f"{_EXAMPLES}_serpapi.sh", **variables)
    assert [hit["source"] for hit in found] == ["serpapi"] * 3
    assert serpapi.fields[0] == {"q": "lune", "num": "10", "engine": "bing", "api_key": "a-serp-key"}


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        (f"{_EXAMPLES}_bm25.sh", {}, "corpus file no/wiki-18.jsonl does not exist; set file_path"),
        (f"{_EXAMPLES}_ann.sh", {}, "corpus file no/wiki-18.jsonl does not exist; set file_path"),
        (f"{_EXAMPLES}_bm25.sh", {"corpus_file": "setup.py"}, "BM25 folder no/bm25 does not exist"),
        (f"{_EXAMPLES}_ann.sh", {"corpus_file": "setup.py"}, "index file no/e5_HNSW64.index does not exist"),
        (f"{_EXAMPLES}_hierarchical.sh", {"corpus_file": "setup.py"}, "index file no/e5_Flat.index does not exist"),
        ("search_r1/search/build_index.sh", {"corpus_file": "no"}, "corpus file no does not exist; set corpus_file"),
    ],
)
def test_a_missing_file_is_one_line(launch, script: str, variables: dict[str, str], message: str) -> None:
    process = launch(script=script, **{"file_path": "no"} | variables)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 1
    assert log.startswith("error: ") and message in log and log.count("\n") == 1


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
        (["--retriever_name", "bm25", "--workers", "2"], "start several servers, each on its own --port, and give the"),
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
        "import sys; from search_r1.search.retriever_loading import *; from search_r1.search.corpus import Corpus; "
        f"import search_r1.search.client, search_r1.search.index_builder, search_r1.search.retrieval_server; "
        f"load_retriever(RetrieverOptions('bm25'), Corpus({str(corpus_file)!r})); "
        "assert not {'torch', 'ray', 'verl', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=server_environment, check=True, timeout=120)


def test_a_mistyped_retriever_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": "1", "contents": "x"}\n')
    arguments = ["--corpus_path", str(corpus), "--retriever_name", "bm52", "--port", "0"]
    assert retrieval_server.main(arguments) == 1
    assert "there is no retriever 'bm52'; did you mean bm25?" in capsys.readouterr().err
