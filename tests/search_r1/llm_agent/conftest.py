"""A real retrieval server over a few passages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_agent_world import PASSAGES, ROOT


@pytest.fixture(scope="session")
def search_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a BM25 server over `PASSAGES`."""
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in PASSAGES.items()]
    corpus.write_text("".join(rows), encoding="utf-8")
    command = [sys.executable, "-m", "search_r1.search.retrieval_server", "--retriever_name", "bm25"]
    log = corpus.with_suffix(".log")
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--corpus_path", str(corpus), "--port", "0"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield _served_url(server, log)
    finally:
        server.terminate()
        server.wait(timeout=20)


def _served_url(server: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server prints once its port is bound; it listens a moment later."""
    for _ in range(600):
        match = re.search(r"http://\S+/retrieve", log.read_text())
        if match:
            return match.group()
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the server ended with {server.returncode}:\n{log.read_text()}")
    raise AssertionError(f"the server did not start within a minute:\n{log.read_text()}")
