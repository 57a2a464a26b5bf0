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

from long_task import track
from search_r1.errors import EncoderError, IndexMismatchError, SearchError, ServerError, TargetTakenError
from search_r1.http.address import without_credentials
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoder_check import check_fit, query_encoder
from search_r1.search.dense.vectors import VectorFile
from search_r1.search.retriever import Hit
from search_r1.search.retriever_options import RetrieverOptions

_EVERY_COLLECTION = {"corpus", "num_rows"}  # in the metadata of all that `store_vectors` writes
_UPLOAD_ROWS = 512  # about 4 MB of JSON at 768 values a vector; Qdrant takes 32 MB a request


class QueryEncoder(Protocol):
    """What turns queries into vectors; `fingerprint` changes with its weights."""

    fingerprint: str

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        """float32 [queries, dim]."""
        ...


class QdrantRetriever:
    """Inner-product search in one collection. Raises `ServerError` when the database fails.

    Equal scores at the place of the last hit are cut as Qdrant likes.
    """

    name = "qdrant"

    def __init__(self, client: Any, collection: str, encoder: QueryEncoder) -> None:
        """Search `collection`, written by `store_vectors`. Raises `IndexMismatchError` when rows are missing."""
        self._client, self._collection, self._encoder = client, collection, encoder
        self._models = _library().models
        found = read_fields(client, collection)
        self._num_rows = int(client.count(collection).count)
        if self._num_rows != found["num_rows"]:
            raise IndexMismatchError(
                f"the Qdrant collection {collection!r} has {self._num_rows} of {found['num_rows']} rows; store it again"
            )
        self.fingerprint = f"qdrant {collection} encoder={encoder.fingerprint} corpus={found['corpus']}"

    @classmethod
    def load(cls, corpus: Corpus, options: RetrieverOptions) -> QdrantRetriever:
        """The collection and the encoder that `options` name.

        Raises `ServerError`, `EncoderError`, or `IndexMismatchError` when the collection is of something else.
        """
        location, collection = options.qdrant_location, options.qdrant_collection
        if not location or not collection or not options.dense_name:
            raise ServerError("retriever 'qdrant' needs --qdrant_location, --qdrant_collection and --dense_name")
        client = connect(location)
        found = read_fields(client, collection)
        encoder = query_encoder(options, found.get("pooling"))
        check_fit(Path(location, collection), found, encoder, corpus, {"num_rows": len(corpus)})
        return cls(client, collection, encoder)

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
    """A client of a server (`http://host:6333`), of a folder, or of memory (`:memory:`), that answers.

    Raises `ServerError`.
    """
    client_class = _library().QdrantClient
    place = {"path": location}
    if "://" in location:
        place = {"url": location}
    elif location == ":memory:":
        place = {"location": location}
    try:
        client = client_class(**place)
        client.get_collections()  # the constructor does not connect
    except Exception as error:  # see `search`
        raise ServerError(
            without_credentials(f"cannot open Qdrant at {location}: {error}; is the database running?")
        ) from error
    return client


def store_vectors(client: Any, collection: str, vectors: VectorFile, fields: dict[str, Any]) -> None:
    """Write `vectors` to a new collection, replacing an earlier one of ours; `fields` say what they were made from.

    Raises `EncoderError` on a vector with NaN or Inf, `ServerError` when the database fails, and `TargetTakenError` as
    `check_collection`.
    """
    models = _library().models
    check_collection(client, collection)
    try:
        if client.collection_exists(collection):
            client.delete_collection(collection)
        client.create_collection(
            collection,
            vectors_config=models.VectorParams(size=vectors.dim, distance=models.Distance.DOT),
            metadata=fields | {"num_rows": len(vectors)},
        )
        blocks = vectors.blocks(_UPLOAD_ROWS)
        for start, block in track(blocks, "qdrant", -(-len(vectors) // _UPLOAD_ROWS), "blocks"):
            if not np.isfinite(block).all():
                bad = start + int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
                raise EncoderError(f"the vector of row {bad} has NaN or Inf; encode the corpus again")
            ids = list(range(start, start + len(block)))
            client.upsert(collection, points=models.Batch(ids=ids, vectors=block.tolist()))
    except SearchError:
        raise
    except Exception as error:  # see `search`
        raise ServerError(f"Qdrant did not take the vectors: {error}; is the database running?") from error


def check_collection(client: Any, collection: str) -> None:
    """Raise `TargetTakenError` when there is a collection of this name that `store_vectors` did not write."""
    found = _metadata(client, collection)
    if found is not None and not found.keys() >= _EVERY_COLLECTION:
        raise TargetTakenError(
            f"the Qdrant collection {collection!r} was not written by the index builder and is not replaced; pass "
            "another --qdrant_collection, or delete it yourself"
        )


def read_fields(client: Any, collection: str) -> dict[str, Any]:
    """The fields that `store_vectors` stored, and `num_rows`. Raises `IndexMismatchError` without such a collection."""
    found = _metadata(client, collection)
    if found is None or not found.keys() >= _EVERY_COLLECTION:
        raise IndexMismatchError(
            f"Qdrant has no collection {collection!r} of this service; write it: "
            "python -m search_r1.search.index_builder --qdrant_location ... --qdrant_collection ..."
        )
    return found


def _metadata(client: Any, collection: str) -> dict[str, Any] | None:
    """{} when it has none, None when there is no such collection."""
    try:
        if not client.collection_exists(collection):
            return None
        return dict(client.get_collection(collection).config.metadata or {})
    except Exception as error:  # see `search`
        raise ServerError(f"Qdrant did not answer: {error}; is the database running?") from error


def _hits(points: list[Any]) -> list[Hit]:
    return sorted((Hit(point.id, float(point.score)) for point in points), key=lambda hit: (-hit.score, hit.row))


def _library() -> ModuleType:
    try:
        return importlib.import_module("qdrant_client")
    except ImportError as error:
        raise ServerError(
            f"the Qdrant retriever needs qdrant-client ({error}); .venv/bin/pip install -e '.[retrieval-qdrant]'"
        ) from error
