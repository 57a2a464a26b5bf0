"""Qdrant inside this process: exact inner products, order, what does not fit, what is missing; built and served."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from search_encoders import encoder, save_bert

from search_r1.errors import EncoderError, IndexMismatchError, ServerError
from search_r1.search import index_builder, retrieval_server
from search_r1.search.corpus import Corpus
from search_r1.search.dense import qdrant as qdrant_backend
from search_r1.search.dense.qdrant import QdrantRetriever, connect, store_vectors
from search_r1.search.dense.vectors import VectorFile
from search_r1.search.retriever import Hit

_INSTALLED = importlib.util.find_spec("qdrant_client") is not None
needs_qdrant = pytest.mark.skipif(not _INSTALLED, reason="qdrant-client is not installed (extra retrieval-qdrant)")


class Lookup:
    """An encoder of known words."""

    fingerprint = "lookup-1"
    _VECTORS = {"x": [1.0, 0.0, 0.0], "yz": [0.0, 2.0, 0.5]}

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return np.array([self._VECTORS[text] for text in texts], dtype=np.float32)


VECTORS = np.array([[0, 1, 2], [3, 0, 1], [0, 4, 0], [3, 1, 0], [3, 0, 0]], dtype=np.float32)
Store = Callable[..., None]
Build = Callable[..., int]


@pytest.fixture
def client() -> Any:
    return connect(":memory:")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Stores vectors, from a file, as those of the corpus "corpus"."""

    def write(client: Any, vectors: np.ndarray = VECTORS) -> None:
        path = tmp_path / "vectors.memmap"
        vectors.tofile(path)
        store_vectors(client, "wiki", VectorFile(path, *vectors.shape), {"corpus": "corpus"})

    return write


@needs_qdrant
def test_scores_are_inner_products_in_order(client: Any, store: Store) -> None:
    store(client)
    retriever = QdrantRetriever(client, "wiki", Lookup())
    x, yz = retriever.search(["x", "yz"], 3)
    assert x == [Hit(1, 3.0), Hit(3, 3.0), Hit(4, 3.0)]  # equal scores: by row
    assert yz == [Hit(2, 8.0), Hit(0, 3.0), Hit(3, 2.0)]
    assert retriever.search(["yz"], 3) == [yz]
    assert [len(hits) for hits in retriever.search(["x"], 100)] == [5] and len(retriever) == 5
    assert retriever.search([], 3) == [] and retriever.search(["x"], 0) == [[]]


@needs_qdrant
def test_a_folder_of_many_blocks_is_found_again(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant_backend, "_UPLOAD_ROWS", 16)
    random = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    first = connect(str(tmp_path / "db"))
    store(first)
    store(first, random)  # replaces
    first.close()
    second = connect(str(tmp_path / "db"))
    (hits,) = QdrantRetriever(second, "wiki", Lookup()).search(["yz"], 20)
    exact = random.astype(np.float64) @ [0.0, 2.0, 0.5]
    assert [hit.row for hit in hits] == np.argsort(-exact)[:20].tolist()
    assert [hit.score for hit in hits] == pytest.approx(np.sort(exact)[::-1][:20].tolist(), rel=1e-5)
    with pytest.raises(ServerError, match="cannot open Qdrant at .*already accessed"):
        connect(str(tmp_path / "db"))
    second.close()


@needs_qdrant
def test_an_unfinished_collection_is_refused(client: Any, store: Store) -> None:
    store(client)
    client.delete("wiki", points_selector=[4])
    with pytest.raises(IndexMismatchError, match="has 4 of 5 rows"):
        QdrantRetriever(client, "wiki", Lookup())
    with pytest.raises(IndexMismatchError, match="no collection 'nowhere'"):
        QdrantRetriever(client, "nowhere", Lookup())


@needs_qdrant
def test_a_vector_that_is_not_finite_is_refused_by_its_row(client: Any, store: Store) -> None:
    vectors = np.ones((700, 3), dtype=np.float32)
    vectors[601, 2] = np.nan
    with pytest.raises(EncoderError, match="row 601 "):
        store(client, vectors)


@needs_qdrant
def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, but nobody listens
        with pytest.raises(ServerError, match="cannot open Qdrant at http.*; is the database running"):
            connect(f"http://127.0.0.1:{probe.getsockname()[1]}")


@needs_qdrant
def test_a_database_that_goes_away_is_an_error(client: Any, store: Store) -> None:
    store(client)
    retriever = QdrantRetriever(client, "wiki", Lookup())
    client.close()
    with pytest.raises(ServerError, match="Qdrant did not answer"):
        retriever.search(["x"], 3)
    with pytest.raises(ServerError, match="Qdrant did not answer"):
        QdrantRetriever(client, "wiki", Lookup())
    with pytest.raises(ServerError, match="Qdrant did not answer"):
        store(client)


def test_without_the_client_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(ServerError, match=r"pip install -e '.\[retrieval-qdrant\]'"):
        connect(":memory:")


@pytest.fixture
def build(corpus_file: Path, tmp_path: Path) -> Build:
    """Runs the index builder into the Qdrant folder `db`."""

    def run(model: Path, *more: str) -> int:
        arguments = ["--retrieval_method", "e5", "--model_path", str(model), "--corpus_path", str(corpus_file)]
        arguments += ["--save_dir", str(tmp_path), "--qdrant_location", str(tmp_path / "db")]
        return index_builder.main([*arguments, "--num_threads", "1", *more])

    return run


def _serving(corpus: Path, model: Path, folder: Path, family: str = "e5") -> list[str]:
    names = ["--retriever_name", "qdrant", "--dense_name", family, "--retriever_model", str(model)]
    place = ["--qdrant_location", str(folder), "--qdrant_collection", "wiki"]
    return ["--corpus_path", str(corpus), "--query_precision", "float32", *names, *place]


@needs_qdrant
def test_built_and_served(build: Build, serve: Any, corpus_file: Path, tmp_path: Path) -> None:
    model = save_bert(tmp_path / "model")
    assert build(model, "--qdrant_collection", "wiki", "--save_embedding") == 0
    assert not list(tmp_path.glob("*.index"))
    vectors = np.fromfile(tmp_path / "emb_e5.memmap", dtype=np.float32).reshape(5, 32)
    server = serve(*_serving(corpus_file, model, tmp_path / "db"))
    queries = ["river morn", "the capital of tarsia"]
    asked = {"queries": queries, "return_scores": True, "topk": 5}
    result = requests.post(f"{server}/retrieve", json=asked, timeout=120).json()["result"]
    passages = list(Corpus(corpus_file))
    for hits, query in zip(result, encoder(model).encode_queries(queries), strict=True):
        exact = vectors @ query
        assert [hit["document"] for hit in hits] == [passages[row] for row in np.argsort(-exact)]
        assert [hit["score"] for hit in hits] == pytest.approx(np.sort(exact)[::-1].tolist(), abs=1e-5)


@needs_qdrant
def test_a_collection_of_something_else_is_refused(
    build: Build, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, second = save_bert(tmp_path / "model"), save_bert(tmp_path / "second", seed=1)
    assert build(model, "--qdrant_collection", "other", "--save_embedding") == 0
    reused = ("--qdrant_collection", "wiki", "--embedding_path", str(tmp_path / "emb_e5.memmap"))
    assert build(second, *reused) == 1 and build(model, *reused) == 0
    rows = corpus_file.read_text(encoding="utf-8").splitlines()
    shorter, changed = tmp_path / "shorter.jsonl", tmp_path / "changed.jsonl"
    shorter.write_text("\n".join(rows[:4]) + "\n", encoding="utf-8")
    changed.write_text("\n".join([*rows[:4], json.dumps({"id": "p50", "contents": "other"})]) + "\n", encoding="utf-8")
    capsys.readouterr()
    database = tmp_path / "db"
    for arguments, message in (
        (_serving(shorter, model, database), "num_rows: index has 5, now 4"),
        (_serving(changed, model, database), "corpus: index has"),
        (_serving(corpus_file, second, database), "weights: index has"),
        (_serving(corpus_file, model, database, "gte"), "query_prefix: index has 'query: ', now ''"),
        (_serving(corpus_file, model, database)[:-4], "needs --qdrant_location, --qdrant_collection"),
    ):
        assert retrieval_server.main([*arguments, "--port", "0"]) == 1
        assert message in capsys.readouterr().err


def test_a_location_without_a_collection_is_an_error(
    build: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(tmp_path) == 1
    assert "--qdrant_location and --qdrant_collection go together" in capsys.readouterr().err
