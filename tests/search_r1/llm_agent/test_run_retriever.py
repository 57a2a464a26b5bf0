"""The retriever of a run that has ended: it is started again by the command that the run has saved."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from e2e_world import ENV, ROOT, free_port, wait_until_up

from search_r1.llm_agent.environment import SearchEnvironment
from search_r1.llm_agent.run_retriever import launch_text, retriever_of_run
from search_r1.tools.environment import ChatSearchEnvironment
from verl.config import Config, load_config
from verl.errors import EnvironmentUnavailable
from verl.run.run_folder import RETRIEVER_FILE


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """In a folder whose name has to be quoted in a shell."""
    path = tmp_path / "my café" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"id": "0", "contents": '"Skarn Light"\nBuilt by Ada.'}) + "\n")
    return path


Start = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a retriever as a user does, in the folder of its corpus."""
    servers = []

    def launch(corpus: Path, *more: str) -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        variables = ENV | {"CORPUS_PATH": corpus.name, "PORT": str(port)}
        server = subprocess.Popen(["bash", ROOT / "retrieval_launch.sh", *more], cwd=corpus.parent, env=variables)
        servers.append(server)
        wait_until_up(server, f"http://127.0.0.1:{port}/readyz")
        return server, f"http://127.0.0.1:{port}/retrieve"

    yield launch
    for server in servers:
        server.terminate()
        server.wait(timeout=120)


def config_at(url: str) -> Config:
    return load_config("tinywiki", [f"retriever.url={url}"])


def arguments(run_dir: Path | None, retriever_url: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(run=run_dir, overrides=[], retriever_url=retriever_url)


def titles(url: str) -> list[str]:
    body = {"queries": ["skarn"], "topk": 1, "return_scores": True}
    [found] = requests.post(url, json=body, timeout=60).json()["result"]
    return [hit["document"]["contents"].partition("\n")[0] for hit in found]


def saved_by_a_run(run_dir: Path, config: Config) -> None:
    run_dir.mkdir()
    for name, text in SearchEnvironment.files(config).items():
        (run_dir / name).write_text(text)


def test_a_retriever_that_has_ended_answers_again(
    corpus: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = start(corpus)
    config, run_dir = config_at(url), tmp_path / "run"
    saved_by_a_run(run_dir, config)
    with retriever_of_run(arguments(run_dir), config):
        assert titles(url) == ['"Skarn Light"']
    assert titles(url) == ['"Skarn Light"'], "one that runs is left alone"

    server.terminate()
    server.wait(timeout=120)
    monkeypatch.chdir(tmp_path)
    for others in (arguments(None), arguments(run_dir, retriever_url=url)):
        with retriever_of_run(others, config), pytest.raises(requests.ConnectionError):
            titles(url)
    with retriever_of_run(arguments(run_dir), config):
        assert titles(config.retriever.url) == ['"Skarn Light"']
    with pytest.raises(requests.ConnectionError):
        titles(url)

    corpus.unlink()
    with pytest.raises(EnvironmentUnavailable, match="ended with status 2: .*corpus.jsonl.*--retriever_url"):
        retriever_of_run(arguments(run_dir), config).__enter__()


def test_a_retriever_that_no_tool_asks_is_not_started_again(corpus: Path, start: Start, tmp_path: Path) -> None:
    server, url = start(corpus)
    config, run_dir = config_at(url), tmp_path / "run"
    saved_by_a_run(run_dir, config)
    server.terminate()
    server.wait(timeout=120)
    config.agent.format, config.agent.tools = "chat", ["calculator"]
    with retriever_of_run(arguments(run_dir), config), pytest.raises(requests.ConnectionError):
        titles(url)


def test_a_launch_of_each_node_is_used(corpus: Path, tmp_path: Path) -> None:
    port = free_port()
    launch = f"CORPUS_PATH='{corpus}' PORT={port} bash '{ROOT}/retrieval_launch.sh'"
    config = config_at(f"http://127.0.0.1:{port}/retrieve")
    config.retriever.placement, config.retriever.launch = "per_node", launch
    with retriever_of_run(arguments(tmp_path), config):
        assert titles(config.retriever.url) == ['"Skarn Light"']


def test_only_what_can_be_started_again_is_saved(corpus: Path, start: Start) -> None:
    _, url = start(corpus)
    config = config_at(url)
    assert RETRIEVER_FILE in SearchEnvironment.files(config)
    config.do_search = False
    assert RETRIEVER_FILE not in SearchEnvironment.files(config)
    # A chat model may have tools that do not search.
    chat = load_config("tinywiki_chat", [f"retriever.url={url}"])
    assert RETRIEVER_FILE in ChatSearchEnvironment.files(chat)
    chat.agent.tools = ["calculator", {"name": "search_r1.tools.open_page.OpenPage"}]
    assert RETRIEVER_FILE in ChatSearchEnvironment.files(chat), "by its whole name"
    chat.agent.tools = ["calculator", "user_tools.shout", {"mcp": "a-server-that-nobody-starts"}]
    assert RETRIEVER_FILE not in ChatSearchEnvironment.files(chat)
    for other in (f"http://127.0.0.1:{free_port()}/retrieve", url.replace("127.0.0.1", "192.0.2.1")):
        assert launch_text(config_at(other).retriever) is None
    _, secret = start(corpus, "--auth_token", "hunter2-hunter2")
    assert launch_text(config_at(secret).retriever) is None
