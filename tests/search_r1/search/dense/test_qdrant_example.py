"""example/retriever/qdrant_engine.py: a corpus stored in a folder of Qdrant, and asked as the environment asks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from search_encoders import encoder

from search_r1.llm_agent.search_engine import Searcher
from search_r1.search.corpus import Corpus
from verl.config import load_config
from verl.errors import EnvironmentUnavailable

_EXAMPLE = Path(__file__).resolve().parents[4] / "example" / "retriever"
_QUERIES = ["river morn", "the capital of tarsia", "a singer in morn"]


def test_the_example_finds_what_the_exact_inner_products_say(
    model_dir: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "db"
    monkeypatch.syspath_prepend(_EXAMPLE)
    import qdrant_engine

    arguments = ["--location", str(database), "--collection", "wiki"]
    arguments += ["--model", str(model_dir), "--corpus_path", str(corpus_file)]
    monkeypatch.setattr(sys, "argv", ["qdrant_engine.py", *arguments])
    qdrant_engine.main()
    client = qdrant_engine.connect(str(database))
    with pytest.raises(ValueError, match="already exists"):  # a collection is never written over
        qdrant_engine.store(client, "wiki", Corpus(corpus_file), encoder(model_dir))
    client.close()

    keys = {"location": database, "collection": "wiki", "model": model_dir}
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
    passages, exact = list(Corpus(corpus_file)), encoder(model_dir)
    vectors_ND = exact.encode_passages([passage["contents"] for passage in passages])
    for query, found in zip(_QUERIES, answers, strict=True):
        scores_N = vectors_ND @ exact.encode_queries([query])[0]
        best = np.argsort(-scores_N)[:3]
        assert [passage["id"] for passage in found] == [passages[row]["id"] for row in best]
        assert [passage["score"] for passage in found] == pytest.approx(scores_N[best].tolist(), abs=2e-2)
        assert found[0]["contents"] == passages[best[0]]["contents"]

    with pytest.raises(EnvironmentUnavailable, match="QdrantEngine: search"):
        asyncio.run(searcher.search("after it was closed"))
