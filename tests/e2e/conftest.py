"""A small TinyWiki, a briefly warmed-up policy and a retrieval server, shared by the end-to-end tests."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_world import ENV, ROOT, free_port, run


@pytest.fixture(scope="session")
def tinywiki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinywiki")
    sizes = ("--num_passages", "600", "--num_train", "120", "--num_test", "40", "--num_sft_rows", "6000")
    run("-m", "search_r1.data.tinywiki", "--output_dir", str(folder), "--seed", "1", *sizes)
    return folder


@pytest.fixture(scope="session")
def policy(tinywiki: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has seen the tag grammar: enough to search, far from enough to be right."""
    folder = tmp_path_factory.mktemp("sft")
    run(
        *("-m", "verl.trainer.sft", "--config-name", "tinywiki_sft", f"data.train_files={tinywiki / 'sft.parquet'}"),
        *(f"model.path={tinywiki / 'policy_init'}", f"trainer.default_local_dir={folder}"),
        "trainer.total_training_steps=60",
    )
    return folder / "global_step_60"


@pytest.fixture(scope="session")
def start_retriever() -> Iterator[Callable[..., str]]:
    """Starts a server on a free port and returns its /retrieve URL."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(corpus: Path, *arguments: str) -> str:
        port = free_port()
        environment = ENV | {"CORPUS_PATH": str(corpus), "PORT": str(port)}
        server = subprocess.Popen(["bash", "retrieval_launch.sh", *arguments], cwd=ROOT, env=environment)
        servers.append(server)
        for _ in range(600):
            assert server.poll() is None, f"the retrieval server ended with {server.returncode}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
                    return f"http://127.0.0.1:{port}/retrieve"
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError("the retrieval server did not become healthy within two minutes")

    yield start
    for server in servers:
        server.terminate()
        server.wait(timeout=20)


@pytest.fixture(scope="session")
def tinywiki_url(tinywiki: Path, start_retriever: Callable[..., str]) -> str:
    return start_retriever(tinywiki / "corpus.jsonl")
