"""The routes of the reranking servers: `/rerank`, and the search routes before a reranker."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from search_r1.search.deadline import answer_in_time
from search_r1.search.rerank_wire import RerankedRetrieveRequest, RerankRequest
from search_r1.search.reranked import RerankedSource
from search_r1.search.reranker import Reranker
from search_r1.search.routes import (
    RESPONSES,
    RawRoute,
    SearchOptions,
    json_response,
    parse,
    reply_headers,
    schema_of,
    search_routes,
)
from search_r1.search.source import EncodedSearch, answers_of
from search_r1.search.wire import SearchRequest


def rerank_router(reranker: Reranker, options: SearchOptions) -> APIRouter:
    """`/rerank` alone."""
    router, headers = APIRouter(route_class=RawRoute), reply_headers(reranker)

    @router.post("/rerank", openapi_extra=schema_of(RerankRequest), responses=RESPONSES)
    async def rerank(http: Request) -> Response:
        """The documents of each query, best first."""

        async def work(body: bytes) -> bytes:
            request = parse(RerankRequest, body)
            outcomes = await reranker.rerank(request.queries, request.documents, request.limit(options.topk))
            return request.reply(answers_of(outcomes))

        return json_response(await answer_in_time(http, options.timeout_s, work), headers)

    return router


def reranked_router(source: RerankedSource, reranker: Reranker, options: SearchOptions) -> APIRouter:
    """The search routes over `source`, where `/retrieve` may choose the number of candidates, and `/rerank`."""

    def search_of(request: SearchRequest) -> EncodedSearch:
        return source.among(request.num_candidates() if isinstance(request, RerankedRetrieveRequest) else None)

    router = search_routes(RerankedRetrieveRequest, search_of, options, reply_headers(source))
    router.include_router(rerank_router(reranker, options))
    return router
