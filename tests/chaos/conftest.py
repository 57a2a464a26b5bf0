"""A retrieval server over a few passages, and the agent's real search environment in front of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_world import PASSAGES


@pytest.fixture(scope="session")
def library_url(tmp_path_factory: pytest.TempPathFactory, start_retriever: Callable[..., str]) -> str:
    """The address of a BM25 server over `PASSAGES`."""
    corpus: Path = tmp_path_factory.mktemp("library") / "corpus.jsonl"
    rows = [json.dumps({"id": name, "contents": contents}) + "\n" for name, contents in PASSAGES.items()]
    corpus.write_text("".join(rows))
    return start_retriever(corpus)
