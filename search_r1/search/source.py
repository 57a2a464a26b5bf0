"""What the HTTP side asks: a local index, an online engine, or another source behind a reranker.

A source that keeps its documents as JSON offers them as such, so that a reply is put together without encoding them
again; `encoded_search` asks every source in the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

_encoder = msgspec.json.Encoder()  # ten times as fast as the standard library's

Found = tuple[dict[str, Any], float]  # a passage (always with `id` and `contents`) and its score


class EncodedHit(NamedTuple):
    """A passage as a JSON object in UTF-8, and its score (finite, higher is better)."""

    document: bytes
    score: float


Answer = tuple[EncodedHit, ...]  # the hits of one query, best first
EncodedSearch = Callable[[list[str], int], Awaitable[list[Answer]]]


class Served(Protocol):
    """What a server stands for. It is called from one event loop."""

    name: str
    num_passages: int | None  # None: not known, as of a search engine

    def close(self) -> Awaitable[None] | None:
        """Let what runs end and fail the ones that wait."""
        ...


class Source(Served, Protocol):
    """Answers queries. A call that is cancelled gives its place in a queue back."""

    async def search(self, queries: list[str], k: int) -> list[list[Found]]:
        """At most `k` passages a query, in the queries' order, best first. A blank query finds nothing.

        Raises `ServiceUnavailable` when the queue is full, or another `SearchError`.
        """
        ...


@runtime_checkable
class EncodedSource(Protocol):
    """A source that also gives its documents as JSON."""

    async def search_encoded(self, queries: list[str], k: int) -> list[Answer]:
        """See `Source.search`."""
        ...


@runtime_checkable
class NeedsWarmUp(Protocol):
    """One whose first answer is slow (kernels are compiled, files are mapped)."""

    async def warm_up(self) -> None:
        """Find one real answer. Raises `SearchError`."""
        ...


def encoded_search(source: Source) -> EncodedSearch:
    """The search of `source` with its documents as JSON."""
    if isinstance(source, EncodedSource):
        return source.search_encoded

    async def search(queries: list[str], k: int) -> list[Answer]:
        found = await source.search(queries, k)
        return [tuple(EncodedHit(encode(passage), score) for passage, score in passages) for passages in found]

    return search


def encode(passage: dict[str, Any]) -> bytes:
    """`passage` as a JSON object in UTF-8."""
    return _encoder.encode(passage)
