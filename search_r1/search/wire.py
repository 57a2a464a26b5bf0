"""The requests that the server understands: what is accepted, within which limits, and the shape of the reply."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Protocol

from pydantic import BaseModel, Field, ValidationError, model_validator

from search_r1.search.source import Answer, EncodedHit

MAX_QUERIES = 4096  # the published trainer sends all trajectories of a step in one request (512 prompts x 5)
MAX_QUERY_CHARS = 32_768
MAX_TOPK = 100
MAX_BODY_BYTES = 32 << 20

Query = Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
Queries = Annotated[list[Query], Field(max_length=MAX_QUERIES)]


class SearchRequest(Protocol):
    """What the three search routes have in common."""

    def texts(self) -> list[str]:
        """The queries as one list."""
        ...

    def limit(self, default: int) -> int:
        """Passages a query; `default` when the request does not say."""
        ...

    def reply(self, answers: list[Answer]) -> bytes:
        """The JSON of the reply."""
        ...


class RetrieveRequest(BaseModel):
    """`queries` is the published field; SkyRL sends `query`, a string or a list. Unknown fields are ignored."""

    queries: Queries | None = None
    query: Query | Queries | None = None
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

    def reply(self, answers: list[Answer]) -> bytes:
        return result(answers, self.return_scores)


class FlashRagRequest(BaseModel):
    """`POST /search` of FlashRAG, ReSearch and ReCall: one query. Unknown fields are ignored."""

    query: Query
    top_n: int = Field(default=10, ge=1, le=MAX_TOPK)
    return_score: bool = False

    def texts(self) -> list[str]:
        return [self.query]

    def limit(self, default: int) -> int:
        return self.top_n

    def reply(self, answers: list[Answer]) -> bytes:
        (answer,) = answers
        return _array([_documents(answer), _scores(answer)]) if self.return_score else _documents(answer)


class FlashRagBatchRequest(BaseModel):
    """`POST /batch_search` of FlashRAG, ReSearch and ReCall: a list of queries. Unknown fields are ignored."""

    query: Queries
    top_n: int = Field(default=10, ge=1, le=MAX_TOPK)
    return_score: bool = False

    def texts(self) -> list[str]:
        return self.query

    def limit(self, default: int) -> int:
        return self.top_n

    def reply(self, answers: list[Answer]) -> bytes:
        documents = _array(map(_documents, answers))
        return _array([documents, _array(map(_scores, answers))]) if self.return_score else documents


def result(answers: list[Answer], return_scores: bool) -> bytes:
    """`{"result": [...]}` with a list for each query: documents, or `{"document": ..., "score": ...}`."""
    return b'{"result": %b}' % _array(map(_scored if return_scores else _documents, answers))


def explain(error: ValidationError) -> str:
    """One line a problem, without echoing the request."""
    problems = error.errors(include_input=False, include_url=False, include_context=False)
    lines = [f"{'.'.join(map(str, item['loc'])) or 'request'}: {item['msg']}" for item in problems[:5]]
    return "; ".join(lines)


def _array(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b", ".join(items)


def _documents(answer: Answer) -> bytes:
    return _array(hit.document for hit in answer)


def _scores(answer: Answer) -> bytes:
    return _array(_number(hit) for hit in answer)


def _scored(answer: Answer) -> bytes:
    return _array(b'{"document": %b, "score": %b}' % (hit.document, _number(hit)) for hit in answer)


def _number(hit: EncodedHit) -> bytes:
    return repr(float(hit.score)).encode()
