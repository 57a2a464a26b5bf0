"""Starting and stopping: the launch script, bad arguments, a port in use, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from documented_commands import Checkout, parse
from e2e_world import free_port
from search_encoders import encoder
from search_engines import Engine

from search_r1.search import index_builder, retrieval_server
from search_r1.search.corpus import Corpus
from search_r1.search.mcp_server import tool as mcp_tool

_ROOT = Path(__file__).resolve().parents[3]
_EXAMPLES = "example/retriever/retrieval_launch"
_OUTSIDE = {"PYTHONPATH": ""}  # nothing but the script says where the code lies


@pytest.fixture
def launch(server_environment: dict[str, str]) -> Callable[..., tuple[int, str]]:
    """Runs a script from another folder to its end: the exit code, and what it wrote."""

    def run(script: str, *arguments: str, cwd: Path = Path("/"), **variables: str) -> tuple[int, str]:
        command, environment = ["bash", str(_ROOT / script), *arguments], server_environment | _OUTSIDE | variables
        done = subprocess.run(command, env=environment, cwd=cwd, stderr=subprocess.PIPE, text=True, timeout=250)
        return done.returncode, done.stderr

    return run


@pytest.fixture
def ask(start_process) -> Callable[..., list[dict]]:
    """What the server of a launch script finds: `ask(query, script, *arguments, cwd=..., **variables)`."""

    def find(query: str, script: str, *arguments: str, cwd: Path = Path("/"), **variables: str) -> list[dict]:
        port = free_port()
        command = ["bash", str(_ROOT / script), "--port", str(port), *arguments]
        start_process(command, port, cwd, **_OUTSIDE | variables)
        reply = requests.post(f"http://127.0.0.1:{port}/retrieve", json={"queries": [query]}, timeout=120)
        return reply.json()["result"][0]

    return find


def test_launch_script_serves_and_stops_cleanly(start_process, corpus_file: Path) -> None:
    """At Ctrl-C; at SIGTERM: test_search_service.py."""
    port = free_port()
    command = ["bash", str(_ROOT / "retrieval_launch.sh"), "--topk", "1"]
    process = start_process(command, port, Path("/"), **_OUTSIDE, CORPUS_PATH=str(corpus_file), PORT=str(port))
    reply = requests.post(f"http://127.0.0.1:{port}/retrieve", json={"queries": ["river Morn"]}, timeout=60)
    assert [hit["id"] for hit in reply.json()["result"][0]] == ["p20"]  # --topk 1 overrides TOPK
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"serving 5 passages by bm25 on http://127.0.0.1:{port}/retrieve" in log
    assert "Traceback" not in log
    with pytest.raises(requests.ConnectionError):
        requests.get(f"http://127.0.0.1:{port}/healthz", timeout=2)


def test_published_bm25_script_from_a_folder_that_has_a_search_r1_too(
    ask, launch, corpus_file: Path, tmp_path: Path
) -> None:
    """Paths are the caller's, the code is that of the script."""
    (tmp_path / "search_r1").mkdir()
    (tmp_path / "search_r1" / "__init__.py").write_text("raise ImportError('the wrong checkout')")
    settings = {"corpus_file": corpus_file.name, "save_dir": "made", "retriever_name": "bm25"}
    arguments = ("--bm25_k1", "1.2", "--bm25_b", "0.75")
    code, log = launch("search_r1/search/build_index.sh", *arguments, cwd=tmp_path, **settings)
    assert code == 0, log
    manifest = json.loads((tmp_path / "made" / "bm25" / "manifest.json").read_text())
    assert (manifest["k1"], manifest["b"]) == (1.2, 0.75)
    corpus_file.rename(tmp_path / "made" / "wiki-18.jsonl")
    found = ask("river Morn", f"{_EXAMPLES}_bm25.sh", cwd=tmp_path, file_path="made")
    assert [hit["id"] for hit in found] == ["p20", "p10"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_published_dense_scripts_build_and_serve(
    serve, checkout: Checkout, model_dir: Path, corpus_file: Path, tmp_path: Path
) -> None:
    settings = f"corpus_file={corpus_file} save_dir={tmp_path} retriever_model={model_dir}"
    [build] = checkout.rehearse(next(parse(f"{settings} bash search_r1/search/build_index.sh --faiss_type HNSW64")))
    assert build.words[:3] == ("python3", "-m", "search_r1.search.index_builder")
    assert index_builder.main(build.arguments) == 0
    made = json.loads((tmp_path / "e5_HNSW64.index.json").read_text())
    assert (made["pooling"], made["max_length"], made["faiss_type"]) == ("mean", 24, "HNSW64"), (
        "the model takes no more"
    )
    assert (tmp_path / "emb_e5.memmap").stat().st_size == 5 * 32 * 4
    corpus_file.rename(tmp_path / "wiki-18.jsonl")
    settings = f"file_path={tmp_path} retriever_path={model_dir}"
    [launch] = checkout.rehearse(next(parse(f"{settings} bash {_EXAMPLES}_ann.sh --host 127.0.0.1")))
    assert launch.words[:3] == ("python3", "-m", "search_r1.search.retrieval_server")
    body = {"queries": ["river morn"], "return_scores": True}
    [found] = requests.post(f"{serve(*launch.arguments)}/retrieve", json=body, timeout=120).json()["result"]
    passages, both = list(Corpus(tmp_path / "wiki-18.jsonl")), encoder(model_dir, precision="auto")
    vectors = both.encode_passages([passage["contents"] for passage in passages])
    scores = vectors @ both.encode_queries(["river morn"])[0]
    best = (-scores).argsort()[:3]
    assert [hit["document"] for hit in found] == [passages[row] for row in best]
    assert [hit["score"] for hit in found] == pytest.approx(scores[best].tolist(), abs=0.02)  # in half precision


def test_published_hierarchical_script_passes_both_stages_on(checkout: Checkout) -> None:
    (checkout.folder / "wiki").mkdir()
    for name in ("wiki-18.jsonl", "e5_Flat.index"):
        (checkout.folder / "wiki" / name).touch()
    line = f"file_path=wiki reranker_path=org/x bash {_EXAMPLES}_hierarchical.sh --faiss_gpu"
    [call] = checkout.rehearse(next(parse(line)))
    assert call.words == (
        *("python3", "-m", "search_r1.search.retrieval_rerank_server"),
        *("--index_path", "wiki/e5_Flat.index", "--corpus_path", "wiki/wiki-18.jsonl", "--retrieval_topk", "10"),
        *("--retriever_name", "e5", "--retriever_model", "intfloat/e5-base-v2"),
        *("--reranking_topk", "3", "--reranker_model", "org/x", "--reranker_batch_size", "32", "--faiss_gpu"),
    )


def test_published_scripts_of_online_engines(ask, run_app) -> None:
    google, serpapi = Engine("google"), Engine("serpapi")
    endpoint = ("--online_endpoint", f"{run_app(google.app)}/engine")
    found = ask("lune", f"{_EXAMPLES}_google.sh", *endpoint, api_key="a-google-key", cse_id="engine 1")
    assert [hit["source"] for hit in found] == ["google"] * 4  # topk 5, and the engine has four pages
    assert google.fields[0] == {"q": "lune", "num": "10", "cx": "engine 1", "key": "a-google-key"}
    variables = {"serp_api_key": "a-serp-key", "serp_engine": "bing", "search_url": f"{run_app(serpapi.app)}/engine"}
    found = ask("lune", f"{_EXAMPLES}_serpapi.sh", **variables)
    assert [hit["source"] for hit in found] == ["serpapi"] * 3
    assert serpapi.fields[0] == {"q": "lune", "num": "10", "engine": "bing", "api_key": "a-serp-key"}


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("retrieval_launch.sh", {"CORPUS_PATH": "no"}, "corpus file no does not exist; set CORPUS_PATH"),
        (f"{_EXAMPLES}_bm25.sh", {}, "corpus file no/wiki-18.jsonl does not exist; set file_path"),
        (f"{_EXAMPLES}_ann.sh", {}, "corpus file no/wiki-18.jsonl does not exist; set file_path"),
        (f"{_EXAMPLES}_bm25.sh", {"corpus_file": "setup.py"}, "BM25 folder no/bm25 does not exist"),
        (f"{_EXAMPLES}_ann.sh", {"corpus_file": "setup.py"}, "index file no/e5_HNSW64.index does not exist"),
        (f"{_EXAMPLES}_hierarchical.sh", {"corpus_file": "setup.py"}, "index file no/e5_Flat.index does not exist"),
        ("search_r1/search/build_index.sh", {"corpus_file": "no"}, "corpus file no does not exist; set corpus_file"),
    ],
)
def test_a_missing_file_is_one_line(launch, script: str, variables: dict[str, str], message: str) -> None:
    code, log = launch(script, **{"file_path": "no"} | variables)
    assert code == 2
    assert log.startswith("error: ") and message in log and log.count("\n") == 1


def test_port_in_use_is_one_line_before_anything_loads(server_environment: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "search_r1.search.retrieval_server", "--port", port]
        command += ["--corpus_path", str(tmp_path / "never_read.jsonl")]
        ended = subprocess.run(command, cwd=_ROOT, env=server_environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
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
        (["--retriever_name", "bm52"], "there is no retriever 'bm52'; did you mean bm25?"),
    ],
)
def test_bad_arguments_are_one_line(
    corpus_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert retrieval_server.main(["--corpus_path", str(corpus_file), "--port", "0", *arguments]) == 2
    log = capsys.readouterr().err
    assert log.startswith("error: ") and message in log and log.count("\n") == 1


def test_malformed_corpus_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "0", "contents": "fine"}\n{"id": "1"}\n')
    assert retrieval_server.main(["--corpus_path", str(path), "--retriever_name", "bm25", "--port", "0"]) == 2
    assert f"{path}, line 2: no 'contents'" in capsys.readouterr().err


def test_a_server_loads_only_what_its_retriever_needs(server_environment: dict[str, str], corpus_file: Path) -> None:
    """An online engine no numerical library; BM25 no torch."""
    code = f"""
import sys
import search_r1.search.serp_search_server, search_r1.search.google_search_server
from search_r1.http.gate import Metrics
from search_r1.search import retrieval_server as server
server.load_source(server.parse_arguments(["--retriever_name", "brave"]), Metrics())
heavy = {{"torch", "numba", "faiss", "numpy", "bm25s"}} & set(sys.modules)
assert not heavy, heavy
import search_r1.search.client, search_r1.search.index_builder
from search_r1.search.corpus import Corpus
from search_r1.search.retriever_loading import RetrieverOptions, load_retriever
load_retriever(RetrieverOptions("bm25"), Corpus({str(corpus_file)!r}))
heavy = {{"torch", "ray", "verl", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    variables = server_environment | {"BRAVE_API_KEY": "a-key-of-the-tests"}
    subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=variables, check=True, timeout=120)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (mcp_tool.main, ["--url", "http://127.0.0.1:1/retrieve"]),
        (retrieval_server.main, ["--corpus_path", "never_read.jsonl", "--retriever_name", "bm25", "--mcp"]),
    ],
)
def test_without_the_package_mcp_the_error_names_the_extra(main, arguments, monkeypatch, capsys) -> None:
    for name in ("mcp", "mcp.server", "mcp.server.stdio"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert "pip install -e '.[retrieval-mcp]'" in message and message.splitlines()[-1].startswith("error: MCP needs")
