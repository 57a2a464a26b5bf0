"""Dense search in Qdrant, a distributed vector database, for corpora that outgrow one machine.

A collection has one point a corpus row, its id the row, and a manifest in its metadata. Qdrant runs as a server or, for
small corpora, inside this process. Needs the extra `retrieval-qdrant`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from search_r1.search.errors import EncoderError, IndexMismatchError, ServerError
from search_r1.search.manifest import check_manifest
from search_r1.search.retriever import Hit

_UPLOAD_ROWS = 512  # about 4 MB of JSON at 768 values a vector; Qdrant takes 32 MB a request


class QueryEncoder(Protocol):
    """What turns queries into vectors of `dim` values; `fingerprint` changes with its weights."""

    dim: int
    fingerprint: str

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """float32 [queries, dim]."""
        ...


class QdrantRetriever:
    """Inner-product search in one collection. Raises `ServerError` when the database fails.

    Equal scores at the place of the last hit are cut as Qdrant likes.
    """

    name = "qdrant"

    def __init__(self, client: Any, collection: str, encoder: QueryEncoder, corpus_digest: str) -> None:
        """Search `collection`, written by `store_vectors`. Raises `IndexMismatchError` when it is of something else."""
        self._client, self._collection, self._encoder = client, collection, encoder
        self._models = _library().models
        found = _manifest(client, collection)
        check_manifest(Path(collection), found, _expected(corpus_digest, encoder.fingerprint, encoder.dim))
        self._num_rows = int(client.count(collection).count)
        if self._num_rows != found["num_rows"]:
            raise IndexMismatchError(
                f"the Qdrant collection {collection!r} has {self._num_rows} of {found['num_rows']} rows; store it again"
            )
        self.fingerprint = f"qdrant {collection} encoder={encoder.fingerprint} corpus={corpus_digest}"

    def __len__(self) -> int:
        return self._num_rows

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; the score is the inner product."""
        if not queries or k < 1:
            return [[] for _ in queries]
        vectors = self._encoder.encode_queries(queries)
        asked = [self._models.QueryRequest(query=vector.tolist(), limit=min(k, len(self))) for vector in vectors]
        try:
            answers = self._client.query_batch_points(self._collection, requests=asked)
        except Exception as error:  # the client raises those of gRPC, of httpx, its own and plain ones
            raise ServerError(f"Qdrant did not answer: {error}; is the database running?") from error
        return [_hits(answer.points) for answer in answers]


def connect(location: str) -> Any:
    """A client of a server (`http://host:6333`), of a folder, or of memory (`:memory:`). Raises `ServerError`."""
    client_class = _library().QdrantClient
    try:
        if "://" in location:
            return client_class(url=location)
        return client_class(location) if location == ":memory:" else client_class(path=location)
    except (ValueError, RuntimeError, OSError) as error:
        raise ServerError(f"cannot open Qdrant at {location}: {error}") from error


def store_vectors(
    client: Any, collection: str, vectors: np.ndarray, corpus_digest: str, encoder_fingerprint: str
) -> None:
    """Write `vectors` (float32 [rows, dim], may be memory-mapped) to a new collection, replacing one of that name.

    Raises `EncoderError` on a vector with NaN or Inf.
    """
    models = _library().models
    rows, dim = vectors.shape
    if client.collection_exists(collection):
        client.delete_collection(collection)
    client.create_collection(
        collection,
        vectors_config=models.VectorParams(size=dim, distance=models.Distance.DOT),
        metadata=_expected(corpus_digest, encoder_fingerprint, dim) | {"num_rows": rows},
    )
    for start in tqdm(range(0, rows, _UPLOAD_ROWS), desc="qdrant", disable=None):
        block = np.asarray(vectors[start : start + _UPLOAD_ROWS])
        if not np.isfinite(block).all():
            bad = start + int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
            raise EncoderError(f"the vector of row {bad} has NaN or Inf; encode the corpus again")
        ids = list(range(start, start + len(block)))
        client.upsert(collection, points=models.Batch(ids=ids, vectors=block.tolist()))


def _manifest(client: Any, collection: str) -> dict[str, Any]:
    try:
        exists = client.collection_exists(collection)
    except Exception as error:  # see `search`
        raise ServerError(f"Qdrant did not answer: {error}; is the database running?") from error
    found = client.get_collection(collection).config.metadata if exists else None
    if not found or "num_rows" not in found:
        raise IndexMismatchError(f"Qdrant has no collection {collection!r} of this service; write it by store_vectors")
    return found


def _expected(corpus_digest: str, encoder_fingerprint: str, dim: int) -> dict[str, Any]:
    return {"format": 1, "corpus": corpus_digest, "weights": encoder_fingerprint, "dim": dim}


def _hits(points: list[Any]) -> list[Hit]:
    return sorted((Hit(point.id, float(point.score)) for point in points), key=lambda hit: (-hit.score, hit.row))


def _library() -> ModuleType:
    try:
        return importlib.import_module("qdrant_client")
    except ImportError as error:
        raise ServerError(
            f"the Qdrant retriever needs qdrant-client ({error}); pip install 'verl[retrieval-qdrant]'"
        ) from error
