"""The interface of what the HTTP routes search: a local index, an online engine, or either with a reranker.

A source that stores its documents as JSON returns them as such, so that a reply is built without encoding them again;
`encoded_search` gives every source the same interface.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from search_r1.errors import SearchError

if TYPE_CHECKING:
    from search_r1.search.pages import Page  # loads NumPy, which an online engine's server starts without

_encoder = msgspec.json.Encoder()  # ten times as fast as the standard library's

ScoredPassage = tuple[dict[str, Any], float]  # a passage (always with `id` and `contents`) and its score


class EncodedHit(NamedTuple):
    """A passage as a JSON object in UTF-8, and its score (finite, higher is better)."""

    document: bytes
    score: float


EncodedHits = tuple[EncodedHit, ...]  # the hits of one query, best first
Outcome = EncodedHits | SearchError  # what became of one query: one that fails fails alone


class EncodedSearch(Protocol):
    """The search of a source whose documents are already JSON."""

    async def __call__(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """The outcome of each query, in order; answers are ordered as in `Source.search`.

        The caller waits at most `wait_s` seconds: a paid source sends no request that would be answered later. Raises
        `ServiceUnavailable` if the queue is full, or another `SearchError` that no single query caused.
        """
        ...


class Served(Protocol):
    """Anything that a server serves. It is called from one event loop."""

    name: str
    num_passages: int | None  # None: not known (an online engine)
    version: str  # changes with whatever changes the answers: the corpus, the index, the encoder, the engine's fields
    batch_size: int | None  # queries that a request should have at most, None for any number

    def close(self) -> Awaitable[None] | None:
        """Let running requests finish; waiting ones fail."""
        ...


class Source(Served, Protocol):
    """Answers queries. A cancelled call gives up its place in the queue."""

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """At most `k` passages per query, in the queries' order, best first. A blank query finds nothing.

        Raises `ServiceUnavailable` if the queue is full, or the first `SearchError` of a query.
        """
        ...


@runtime_checkable
class EncodedSource(Protocol):
    """A source that can also return its documents as JSON."""

    async def search_encoded(self, queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        """See `EncodedSearch`."""
        ...


@runtime_checkable
class HasPages(Protocol):
    """A source whose passages are parts of pages."""

    async def page(self, name: str, max_chars: int) -> Page | None:
        """The beginning of the page to which the passage with the id `name` belongs; None if there is no such passage.

        Raises `SearchError`.
        """
        ...


@runtime_checkable
class NeedsWarmUp(Protocol):
    """A source whose first answer is slow (kernels are compiled, files are mapped)."""

    async def warm_up(self) -> None:
        """Answer one real query. Raises `SearchError`."""
        ...


def encoded_search(source: Source) -> EncodedSearch:
    """The search of `source` with its documents as JSON."""
    if isinstance(source, EncodedSource):
        return source.search_encoded

    async def search(queries: list[str], k: int, wait_s: float = math.inf) -> list[Outcome]:
        found = await source.search(queries, k)
        return [encode_hits(passages) for passages in found]

    return search


def hits_or_raise(outcomes: Sequence[Outcome]) -> list[EncodedHits]:
    """The hits of all queries. Raises the first error."""
    answers: list[EncodedHits] = []
    for outcome in outcomes:
        if isinstance(outcome, SearchError):
            raise outcome
        answers.append(outcome)
    return answers


def decode_hits(outcomes: Sequence[Outcome]) -> list[list[ScoredPassage]]:
    """The answers as `Source.search` gives them. Raises the first error."""
    return [[(json.loads(hit.document), hit.score) for hit in answer] for answer in hits_or_raise(outcomes)]


def encode_hits(passages: Sequence[ScoredPassage]) -> EncodedHits:
    """The passages of one query with their documents as JSON."""
    return tuple(EncodedHit(encode(passage), score) for passage, score in passages)


def version_of(*parts: object) -> str:
    """A short identifier of everything that the answers depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def encode(passage: dict[str, Any]) -> bytes:
    """`passage` as a JSON object in UTF-8."""
    return _encoder.encode(passage)
