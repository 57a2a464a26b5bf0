"""Qdrant as the search engine of the agent, without our retrieval server: an example of `retriever.engine`.

    .venv/bin/pip install -e '.[retrieval-qdrant]'
    .venv/bin/python example/retriever/qdrant_engine.py --location http://127.0.0.1:6333 --collection wiki \\
      --model intfloat/e5-base-v2 --corpus_path corpus.jsonl

writes a corpus to a new collection: one point a passage, its payload the corpus row. Then, for every program with a
`retriever` in its configuration:

    PYTHONPATH=example/retriever bash train_grpo.sh retriever.engine=qdrant_engine.QdrantEngine \\
      +retriever.engine_kwargs.location=http://127.0.0.1:6333 +retriever.engine_kwargs.collection=wiki \\
      +retriever.engine_kwargs.model=intfloat/e5-base-v2

A location without `://` is a folder, which one process at a time may open. A failed search raises what Qdrant's client
raises; the environment reports it as a search that failed, not as an empty result.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any

from qdrant_client import QdrantClient, models

from long_task import Progress
from search_r1.search.corpus import Corpus
from search_r1.search.dense.encoding.encoder import Encoder, EncoderOptions

_UPLOAD_ROWS = 256  # of a request, which may have 32 MB


class QdrantEngine:
    """Inner-product search in one collection that `store` wrote."""

    def __init__(self, location: str, collection: str, model: str, family: str = "e5", topk: int = 3) -> None:
        """`model` encodes the queries, as `family` does (see `--retriever_name`); it must be that of the passages."""
        self._client, self._collection, self._topk = connect(location), collection, topk
        self._encoder = Encoder(EncoderOptions(family, model))
        self._encoding = threading.Lock()  # searches run in several threads

    def search(self, query: str) -> list[dict[str, Any]]:
        """The passages, best first, each with its `score`."""
        with self._encoding:
            (vector_D,) = self._encoder.encode_queries([query])
        found = self._client.query_points(self._collection, query=vector_D.tolist(), limit=self._topk)
        return [{**point.payload, "score": point.score} for point in found.points]

    def close(self) -> None:
        self._client.close()


def connect(location: str) -> QdrantClient:
    """A client of a server (`http://host:6333`) or of a folder."""
    return QdrantClient(url=location) if "://" in location else QdrantClient(path=location)


def store(client: QdrantClient, collection: str, corpus: Corpus, encoder: Encoder) -> None:
    """Encode `corpus` into a new collection. Raises what the client raises when there is one of this name."""
    vectors = models.VectorParams(size=encoder.dim, distance=models.Distance.DOT)
    client.create_collection(collection, vectors_config=vectors)
    with Progress("qdrant", len(corpus), unit="passages") as progress:
        for start in range(0, len(corpus), _UPLOAD_ROWS):
            rows = range(start, min(start + _UPLOAD_ROWS, len(corpus)))
            passages = [corpus[row] for row in rows]
            vectors_BD = encoder.encode_passages([passage["contents"] for passage in passages])
            points = models.Batch(ids=list(rows), vectors=vectors_BD.tolist(), payloads=passages)
            client.upsert(collection, points)
            progress.update(len(rows))


def main() -> None:
    """Write a corpus to a collection."""
    parser = argparse.ArgumentParser(description="Write a corpus to a Qdrant collection.")
    parser.add_argument("--location", required=True, help="http://host:6333, or a folder")
    parser.add_argument("--collection", required=True, help="its name; there must be none of this name yet")
    parser.add_argument("--model", required=True, help="folder or hub id of the encoder")
    parser.add_argument("--family", default="e5", help="of the encoder: e5, bge, ...")
    parser.add_argument("--corpus_path", required=True, help="passages, .jsonl or .jsonl.gz")
    arguments = parser.parse_args()
    encoder = Encoder(EncoderOptions(arguments.family, arguments.model))
    client = connect(arguments.location)
    store(client, arguments.collection, Corpus(arguments.corpus_path), encoder)
    client.close()


if __name__ == "__main__":
    main()
