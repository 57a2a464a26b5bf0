"""The interface of every retriever: rows of a corpus for a query, best first."""

from __future__ import annotations

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
