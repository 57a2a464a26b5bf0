"""Qdrant inside this process: exact inner products, order, what does not fit, and what is missing."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_r1.search.errors import EncoderError, IndexMismatchError, ServerError
from search_r1.search.qdrant_backend import QdrantRetriever, connect, store_vectors
from search_r1.search.retriever import Hit

_INSTALLED = importlib.util.find_spec("qdrant_client") is not None
needs_qdrant = pytest.mark.skipif(not _INSTALLED, reason="qdrant-client is not installed (extra retrieval-qdrant)")


class Lookup:
    """An encoder of known words."""

    dim, fingerprint = 3, "lookup-1"
    _VECTORS = {"x": [1.0, 0.0, 0.0], "yz": [0.0, 2.0, 0.5]}

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        return np.array([self._VECTORS[text] for text in texts], dtype=np.float32)


VECTORS = np.array([[0, 1, 2], [3, 0, 1], [0, 4, 0], [3, 1, 0], [3, 0, 0]], dtype=np.float32)


@pytest.fixture
def client() -> Any:
    return connect(":memory:")


@needs_qdrant
def test_scores_are_inner_products_in_order(client: Any) -> None:
    store_vectors(client, "wiki", VECTORS, "corpus", Lookup.fingerprint)
    retriever = QdrantRetriever(client, "wiki", Lookup(), "corpus")
    x, yz = retriever.search(["x", "yz"], 3)
    assert x == [Hit(1, 3.0), Hit(3, 3.0), Hit(4, 3.0)]  # equal scores: by row
    assert yz == [Hit(2, 8.0), Hit(0, 3.0), Hit(3, 2.0)]
    assert retriever.search(["yz"], 3) == [yz]
    assert [len(hits) for hits in retriever.search(["x"], 100)] == [5] and len(retriever) == 5
    assert retriever.search([], 3) == [] and retriever.search(["x"], 0) == [[]]


@needs_qdrant
def test_a_folder_of_many_blocks_is_found_again(tmp_path: Path) -> None:
    random = np.random.default_rng(0).normal(size=(1300, 3)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", random)
    mapped = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    first = connect(str(tmp_path / "db"))
    store_vectors(first, "wiki", VECTORS, "old", Lookup.fingerprint)
    store_vectors(first, "wiki", mapped, "corpus", Lookup.fingerprint)  # replaces
    first.close()
    second = connect(str(tmp_path / "db"))
    (hits,) = QdrantRetriever(second, "wiki", Lookup(), "corpus").search(["yz"], 20)
    exact = random.astype(np.float64) @ [0.0, 2.0, 0.5]
    assert [hit.row for hit in hits] == np.argsort(-exact)[:20].tolist()
    assert [hit.score for hit in hits] == pytest.approx(np.sort(exact)[::-1][:20].tolist(), rel=1e-5)
    with pytest.raises(ServerError, match="cannot open Qdrant at .*already accessed"):
        connect(str(tmp_path / "db"))
    second.close()


@needs_qdrant
def test_a_collection_of_something_else_is_refused(client: Any) -> None:
    store_vectors(client, "wiki", VECTORS, "corpus", Lookup.fingerprint)
    with pytest.raises(IndexMismatchError, match="corpus: index has 'corpus', now 'another'"):
        QdrantRetriever(client, "wiki", Lookup(), "another")
    store_vectors(client, "wiki", VECTORS, "corpus", "other weights")
    with pytest.raises(IndexMismatchError, match="weights: index has 'other weights', now 'lookup-1'"):
        QdrantRetriever(client, "wiki", Lookup(), "corpus")
    store_vectors(client, "wiki", VECTORS[:, :2], "corpus", Lookup.fingerprint)
    with pytest.raises(IndexMismatchError, match="dim: index has 2, now 3"):
        QdrantRetriever(client, "wiki", Lookup(), "corpus")
    with pytest.raises(IndexMismatchError, match="no collection 'nowhere'"):
        QdrantRetriever(client, "nowhere", Lookup(), "corpus")


@needs_qdrant
def test_an_unfinished_collection_is_refused(client: Any) -> None:
    store_vectors(client, "wiki", VECTORS, "corpus", Lookup.fingerprint)
    client.delete("wiki", points_selector=[4])
    with pytest.raises(IndexMismatchError, match="has 4 of 5 rows"):
        QdrantRetriever(client, "wiki", Lookup(), "corpus")


@needs_qdrant
def test_a_vector_that_is_not_finite_is_refused_by_its_row(client: Any) -> None:
    vectors = np.ones((700, 3), dtype=np.float32)
    vectors[601, 2] = np.nan
    with pytest.raises(EncoderError, match="row 601 "):
        store_vectors(client, "wiki", vectors, "corpus", Lookup.fingerprint)


@needs_qdrant
@pytest.mark.filterwarnings("ignore:Failed to obtain server version")
def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # taken, but nobody listens
        client = connect(f"http://127.0.0.1:{probe.getsockname()[1]}")
        with pytest.raises(ServerError, match="Qdrant did not answer"):
            QdrantRetriever(client, "wiki", Lookup(), "corpus")


@needs_qdrant
def test_a_database_that_goes_away_is_an_error(client: Any) -> None:
    store_vectors(client, "wiki", VECTORS, "corpus", Lookup.fingerprint)
    retriever = QdrantRetriever(client, "wiki", Lookup(), "corpus")
    client.close()
    with pytest.raises(ServerError, match="Qdrant did not answer"):
        retriever.search(["x"], 3)


@pytest.mark.skipif(_INSTALLED, reason="qdrant-client is installed")
def test_without_the_client_the_error_names_what_to_install() -> None:
    with pytest.raises(ServerError, match=r"pip install 'verl\[retrieval-qdrant\]'"):
        connect(":memory:")
