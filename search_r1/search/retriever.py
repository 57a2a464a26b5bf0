"""The interface of every retriever: rows of a corpus for a query, best first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Hit(NamedTuple):
    """One retrieved row: `row` counts corpus lines from 0; `score` is on the retriever's scale, higher is better."""

    row: int
    score: float


class Retriever(Protocol):
    """A searchable index. It is called from one thread at a time, so it needs no lock."""

    name: str

    def __len__(self) -> int:
        """Number of indexed rows."""
        ...

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, in the queries' order, by (score descending, row ascending).

        A query without a match has an empty list; rows are always in [0, len(self)).
        """
        ...


# The settings of a retriever.


@dataclass(frozen=True)
class RetrieverOptions:
    """The settings of a retriever: its index, its encoder, and how they compute."""

    name: str
    """`bm25`, `hybrid` (bm25 and a dense one), or the family of a dense encoder."""
    index_path: str | None = None
    """BM25 or Lucene folder, FAISS file or embeddings file; for `hybrid`, the dense one."""
    model: str | None = None
    """Folder or hub id of the query encoder."""
    gpu: bool = False
    """Put the vectors on a GPU."""
    num_threads: int = 1
    """CPU threads of the encoder and the index."""
    engine: str = "auto"
    """For a dense index: `faiss`, `matrix` (exact, Flat indexes only), or `auto`: matrix if possible."""
    search_parameters: str = ""
    """For a FAISS index, such as `nprobe=32` or `efSearch=128`."""
    query_precision: str = "auto"
    """Precision of the query encoder: auto, float32, bfloat16 or float16."""
    dense_name: str | None = None
    """For `hybrid`: the encoder family."""
    bm25_index_path: str | None = None
    """For `hybrid`: the BM25 folder; None builds it in memory."""

    @property
    def encoder_family(self) -> str:
        """The family of the dense encoder."""
        return self.dense_name or self.name
