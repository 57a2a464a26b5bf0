"""The HTTP side of the reranking servers: their requests, `/rerank`, and the search routes with a reranker."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from search_r1.http.routes import answer_in_time
from search_r1.search.rerank.loading import MAX_DOCUMENTS
from search_r1.search.rerank.reranker import RerankedSource, Reranker
from search_r1.search.server.routes import (
    RESPONSES,
    RawRoute,
    SearchOptions,
    json_response,
    parse,
    reply_headers,
    schema_of,
    search_routes,
)
from search_r1.search.server.source_interface import EncodedHits, EncodedSearch, hits_or_raise
from search_r1.search.server.wire import (
    MAX_QUERIES,
    MAX_TOPK,
    KnownFields,
    Queries,
    RetrieveRequest,
    SearchRequest,
    result,
)

MAX_PAIRS = 65_536  # of a request; the published trainer's largest has 2560 queries
MAX_CONTENTS_CHARS = 131_072

OptionalTopk = Annotated[int | None, Field(ge=0, le=MAX_TOPK, description="null or 0: the server's default")]


def _encoded(value: Any) -> bytes:
    """The passage as JSON. It may be sent as a search gave it: in `{"document": ..., "score": ...}`."""
    document = value.get("document", value) if isinstance(value, dict) else value
    contents = document.get("contents") if isinstance(document, dict) else None
    if not isinstance(contents, str):
        raise ValueError('send {"contents": "..."} with a string')
    if len(contents) > MAX_CONTENTS_CHARS:
        raise ValueError(f'"contents" has {len(contents)} characters; send at most {MAX_CONTENTS_CHARS}')
    return json.dumps(document, ensure_ascii=False, allow_nan=False).encode()  # NaN, which is no JSON: ValueError


_SCHEMA = {"type": "object", "properties": {"contents": {"type": "string"}}, "additionalProperties": True}
EncodedDocument = Annotated[bytes, BeforeValidator(_encoded), WithJsonSchema(_SCHEMA)]


class RerankRequest(KnownFields):
    """`POST /rerank`: each query with its own documents."""

    queries: Queries
    documents: list[Annotated[list[EncodedDocument], Field(max_length=MAX_DOCUMENTS)]] = Field(max_length=MAX_QUERIES)
    rerank_topk: int | None = Field(default=None, ge=0, le=MAX_DOCUMENTS, description="null or 0: the server's default")
    topk: int | None = Field(default=None, ge=0, le=MAX_DOCUMENTS, description="used if rerank_topk is absent")
    return_scores: bool = False

    @model_validator(mode="after")
    def _fits(self) -> RerankRequest:
        if len(self.queries) != len(self.documents):
            raise ValueError(
                f"{len(self.queries)} queries and {len(self.documents)} lists of documents; send a list for each query"
            )
        num_pairs = sum(map(len, self.documents))
        if num_pairs > MAX_PAIRS:
            raise ValueError(f"{num_pairs} documents; send at most {MAX_PAIRS} at once")
        return self

    def limit(self, default: int) -> int:
        """Documents per query; `default` if the request does not say."""
        return self.rerank_topk or self.topk or default

    def reply(self, answers: list[EncodedHits]) -> bytes:
        """The JSON of the reply."""
        return result(answers, self.return_scores)


class Reranking(KnownFields):
    """The field `rerank` of a request: its wishes about the reranker."""

    candidates: OptionalTopk = None
    model: str | None = Field(default=None, description="not available: the model is fixed by the server")

    @field_validator("model")
    @classmethod
    def _is_the_servers(cls, model: str | None) -> None:
        if model is not None:
            raise ValueError("the model is chosen when the server starts, by --reranker_model")


class RerankedRetrieveRequest(RetrieveRequest):
    """`POST /retrieve` with a reranker: also accepts the published fields `topk_retrieval` and `topk_rerank`."""

    topk_retrieval: OptionalTopk = None
    topk_rerank: OptionalTopk = Field(default=None, description="takes precedence over topk")
    # the schema in place: OpenAPI finds no reference inside a schema
    rerank: Annotated[Reranking | None, WithJsonSchema(Reranking.model_json_schema())] = None

    def limit(self, default: int) -> int:
        return self.topk_rerank or self.topk or default

    def num_candidates(self) -> int | None:
        """Passages per query that the reranker reads; None: the server's default."""
        requested = self.rerank.candidates if self.rerank else None
        return requested or self.topk_retrieval or None


def rerank_router(reranker: Reranker, options: SearchOptions) -> APIRouter:
    """The route `/rerank` alone."""
    router, headers = APIRouter(route_class=RawRoute), reply_headers(reranker)

    @router.post("/rerank", openapi_extra=schema_of(RerankRequest), responses=RESPONSES)
    async def rerank(http: Request) -> Response:
        """The documents of each query, best first."""

        async def work(body: bytes) -> bytes:
            request = parse(RerankRequest, body)
            outcomes = await reranker.rerank(request.queries, request.documents, request.limit(options.topk))
            return request.reply(hits_or_raise(outcomes))

        return json_response(await answer_in_time(http, options.timeout_s, work), headers)

    return router


def reranked_router(source: RerankedSource, reranker: Reranker, options: SearchOptions) -> APIRouter:
    """The search routes over `source`, in which `/retrieve` may set the number of candidates, and `/rerank`."""

    def search_of(request: SearchRequest) -> EncodedSearch:
        return source.among(request.num_candidates() if isinstance(request, RerankedRetrieveRequest) else None)

    router = search_routes(RerankedRetrieveRequest, search_of, options, reply_headers(source))
    router.include_router(rerank_router(reranker, options))
    return router
