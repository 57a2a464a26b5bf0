"""The requests that the server understands (what is accepted, within which limits), the format of the reply, and how a
failed search is reported: a status and a body for a request, a few fields for one of its queries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from search_r1.errors import (
    OnlineRejected,
    OnlineReplyError,
    OnlineUnavailable,
    ReplayMissError,
    SearchError,
    ServiceUnavailable,
)
from search_r1.http.routes import MAX_BODY_BYTES
from search_r1.search.server.source_interface import EncodedHit, EncodedHits, Outcome

EACH_HEADER = b"x-query-errors"  # with the value "each": the client reads the errors of single queries
_PASSING = (ServiceUnavailable, OnlineUnavailable)
_FINAL = (OnlineRejected, OnlineReplyError, ReplayMissError)


def status_of(error: SearchError) -> int:
    """The HTTP status of an error. 503: temporary. 424: a service behind this server failed, and a retry would
    cost the same. 500: all else.
    """
    if isinstance(error, _PASSING):
        return 503
    return 424 if isinstance(error, _FINAL) else 500


def retry_after_s(error: SearchError) -> float | None:
    """Seconds until a retry may help; None if unknown."""
    return error.retry_after_s if isinstance(error, _PASSING) else None


def retry_header(error: SearchError) -> dict[str, str]:
    """The header Retry-After of an error, in whole seconds; no header if it is unknown when a retry may help."""
    seconds = retry_after_s(error)
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def failure(error: SearchError) -> dict[str, Any]:
    """The fields that report one failed query in a reply."""
    seconds = retry_after_s(error)
    retry = {} if seconds is None else {"retry_after_s": round(seconds, 3)}
    return {"status": status_of(error), "detail": str(error)} | retry


MAX_QUERIES = 4096  # the published trainer sends all trajectories of a step in one request (512 prompts x 5)
MAX_QUERY_CHARS = 32_768
MAX_TOPK = 100
DEFAULT_PAGE_CHARS, MAX_PAGE_CHARS = 100_000, 2_000_000
_SHOWN_CHARS = 100
LIMITS = {"queries": MAX_QUERIES, "query_chars": MAX_QUERY_CHARS, "topk": MAX_TOPK, "body_bytes": MAX_BODY_BYTES}

QueryText = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
Queries = Annotated[list[QueryText], Field(max_length=MAX_QUERIES)]


class SearchRequest(Protocol):
    """The interface of the requests of the three search routes."""

    def texts(self) -> list[str]:
        """The queries as one list."""
        ...

    def limit(self, default: int) -> int:
        """Passages per query; `default` if the request does not say."""
        ...

    def reply(self, answers: list[EncodedHits]) -> bytes:
        """The JSON of the reply."""
        ...


class KnownFields(BaseModel):
    """A request that rejects unknown fields: a misspelt one, such as "top_k", would otherwise be ignored silently."""

    model_config = ConfigDict(extra="forbid")


class RetrieveRequest(KnownFields):
    """`queries` is the published field; SkyRL sends `query`, a string or a list."""

    queries: Queries | None = None
    query: QueryText | Queries | None = None
    topk: int | None = Field(default=None, ge=0, le=MAX_TOPK, description="null or 0: the server's default")
    return_scores: bool = False

    @model_validator(mode="after")
    def _has_queries(self) -> RetrieveRequest:
        if self.queries is None and self.query is None:
            raise ValueError('send "queries": a list of strings')
        return self

    def texts(self) -> list[str]:
        if self.queries is not None:
            return self.queries
        return [self.query] if isinstance(self.query, str) else self.query or []

    def limit(self, default: int) -> int:
        return self.topk or default

    def reply(self, answers: Sequence[Outcome]) -> bytes:
        return result(answers, self.return_scores)


class PageRequest(KnownFields):
    """`POST /page`: the page to which a passage belongs."""

    id: QueryText = Field(min_length=1, description="of a passage, as a search gave it")
    max_chars: int = Field(default=DEFAULT_PAGE_CHARS, ge=1, le=MAX_PAGE_CHARS, description="of the text")


class FlashRagRequest(KnownFields):
    """`POST /search` of FlashRAG, ReSearch and ReCall: one query."""

    query: QueryText
    top_n: int = Field(default=10, ge=1, le=MAX_TOPK)
    return_score: bool = False

    def texts(self) -> list[str]:
        return [self.query]

    def limit(self, default: int) -> int:
        return self.top_n

    def reply(self, answers: list[EncodedHits]) -> bytes:
        (answer,) = answers
        return _array([_documents(answer), _scores(answer)]) if self.return_score else _documents(answer)


class FlashRagBatchRequest(KnownFields):
    """`POST /batch_search` of FlashRAG, ReSearch and ReCall: a list of queries."""

    query: Queries
    top_n: int = Field(default=10, ge=1, le=MAX_TOPK)
    return_score: bool = False

    def texts(self) -> list[str]:
        return self.query

    def limit(self, default: int) -> int:
        return self.top_n

    def reply(self, answers: list[EncodedHits]) -> bytes:
        documents = _array(map(_documents, answers))
        return _array([documents, _array(map(_scores, answers))]) if self.return_score else documents


def result(outcomes: Sequence[Outcome], return_scores: bool) -> bytes:
    """`{"result": [...]}` with a list for each query: documents, or `{"document": ..., "score": ...}`.

    A query that failed has null, and its `failure` under its index in `"errors"`, which is present only then.
    """

    def shown(hit: EncodedHit) -> bytes:
        return b'{"document": %b, "score": %b}' % (hit.document, _number(hit)) if return_scores else hit.document

    lists = _array(b"null" if isinstance(outcome, SearchError) else _array(map(shown, outcome)) for outcome in outcomes)
    errors = {number: failure(error) for number, error in enumerate(outcomes) if isinstance(error, SearchError)}
    error_field = b', "errors": %b' % json.dumps(errors).encode() if errors else b""
    return b'{"result": %b%b}' % (lists, error_field)


def explain(error: ValidationError, known: Collection[str] = ()) -> str:
    """One line per problem, without quoting the request's content; `known` are the valid fields."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(_problem(item["loc"], item["type"], item["msg"], known) for item in problems[:5])


def _problem(place: Sequence[int | str], kind: str, message: str, known: Collection[str]) -> str:
    name = ".".join(map(str, place))[:_SHOWN_CHARS] or "request"
    if kind != "extra_forbidden":
        return f"{name}: {message}"
    nearest = get_close_matches(name, known, n=1, cutoff=0.0) if len(place) == 1 else []
    return f"{name}: unknown field" + "".join(f'; the nearest of {", ".join(known)} is "{one}"' for one in nearest)


def _array(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b", ".join(items)


def _documents(answer: EncodedHits) -> bytes:
    return _array(hit.document for hit in answer)


def _scores(answer: EncodedHits) -> bytes:
    return _array(_number(hit) for hit in answer)


def _number(hit: EncodedHit) -> bytes:
    return repr(float(hit.score)).encode()
