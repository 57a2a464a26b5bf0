"""example/retriever/qdrant_engine.py: a corpus stored in a folder of Qdrant, and asked as the environment asks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from search_encoders import encoder, save_bert

from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.corpus import Corpus
from verl.config import load_config
from verl.errors import EnvironmentUnavailable

_EXAMPLE = Path(__file__).resolve().parents[4] / "example" / "retriever"
_QUERIES = ["river morn", "the capital of tarsia", "a singer in morn"]


def test_the_example_finds_what_the_exact_inner_products_say(
    corpus_file: Path, tmp_path: Path, server_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, database = save_bert(tmp_path / "model"), tmp_path / "db"
    command = [sys.executable, str(_EXAMPLE / "qdrant_engine.py"), "--location", str(database), "--collection", "wiki"]
    command += ["--model", str(model), "--corpus_path", str(corpus_file)]
    subprocess.run(command, check=True, env=server_environment)
    again = subprocess.run(command, check=False, env=server_environment, capture_output=True, text=True)
    assert again.returncode == 1 and "already exists" in again.stderr, "a collection is never written over"

    monkeypatch.syspath_prepend(_EXAMPLE)
    keys = {"location": database, "collection": "wiki", "model": model}
    config = load_config(
        "ppo_trainer",
        ["retriever.engine=qdrant_engine.QdrantEngine", "retriever.topk=3"]
        + [f"+retriever.engine_kwargs.{key}={value}" for key, value in keys.items()],
    )
    searcher = Searcher.from_config(config.retriever)

    async def ask() -> list[list]:
        found = await asyncio.gather(*map(searcher.search, _QUERIES))
        await searcher.close()
        return found

    answers = asyncio.run(ask())
    passages, exact = list(Corpus(corpus_file)), encoder(model)
    vectors_ND = exact.encode_passages([passage["contents"] for passage in passages])
    for query, found in zip(_QUERIES, answers, strict=True):
        scores_N = vectors_ND @ exact.encode_queries([query])[0]
        best = np.argsort(-scores_N)[:3]
        assert [passage["id"] for passage in found] == [passages[row]["id"] for row in best]
        assert [passage["score"] for passage in found] == pytest.approx(scores_N[best].tolist(), abs=2e-2)
        assert found[0]["contents"] == passages[best[0]]["contents"]

    with pytest.raises(EnvironmentUnavailable, match="QdrantEngine: search"):
        asyncio.run(searcher.search("after it was closed"))
