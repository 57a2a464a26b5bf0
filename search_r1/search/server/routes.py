"""The search routes: the published `/retrieve`, and `/search` and `/batch_search` of FlashRAG."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import BaseModel, ValidationError

from search_r1.errors import SearchError
from search_r1.http.gate import FAILED_QUERIES
from search_r1.http.routes import RawRoute, allowed_s, answer_in_time, json_response, schema_of
from search_r1.search.server.source_interface import (
    EncodedSearch,
    HasPages,
    Outcome,
    Served,
    Source,
    encoded_search,
    hits_or_raise,
)
from search_r1.search.server.wire import (
    EACH_HEADER,
    FlashRagBatchRequest,
    FlashRagRequest,
    PageRequest,
    RetrieveRequest,
    SearchRequest,
    explain,
)

_LOG = logging.getLogger(__name__)
Model = TypeVar("Model", bound=BaseModel)

RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The passages, best first."},
    401: {"description": "The bearer token is missing or wrong."},
    413: {"description": "The body is too large."},
    422: {"description": "The request is not valid; `detail` says what is wrong."},
    424: {"description": "An online engine refused a query, or its answer cannot be used."},
    500: {"description": "The search failed."},
    503: {"description": "The queue is full, the server is stopping, or an online engine fails; see Retry-After."},
    504: {"description": "Not answered within the deadline."},
}


_PAGE_RESPONSES: dict[int | str, dict[str, Any]] = RESPONSES | {
    200: {"description": "The page, or null if there is no such passage."},
    404: {"description": "What is searched has no pages."},
    500: {"description": "The corpus cannot be read."},
}
del _PAGE_RESPONSES[424]


@dataclass(frozen=True)
class SearchOptions:
    """`topk`: passages per query if the request does not say; `timeout_s`: the maximum time of a request."""

    topk: int = 3
    timeout_s: float = 120.0


def search_router(source: Source, options: SearchOptions) -> APIRouter:
    """The three search routes over one source."""
    search = encoded_search(source)
    return search_routes(RetrieveRequest, lambda _: search, options, reply_headers(source))


def reply_headers(served: Served) -> dict[str, str]:
    """The headers of every reply: the version of the index, and the number of queries to put into a request."""
    hint = {} if served.batch_size is None else {"X-Batch-Size": str(served.batch_size)}
    return {"X-Index-Version": served.version} | hint


def search_routes(
    retrieve_model: type[RetrieveRequest],
    search_of: Callable[[SearchRequest], EncodedSearch],
    options: SearchOptions,
    headers: Mapping[str, str],
) -> APIRouter:
    """The three routes; `/retrieve` parses a `retrieve_model`, and `search_of(request)` returns the search to use.

    `headers` are sent with every reply.
    """
    router = APIRouter(route_class=RawRoute)

    # Parse, search and reply within the deadline. A search that cannot end before it should know how much time is left.
    async def answer(http: Request, parse: Callable[[bytes], SearchRequest]) -> Response:
        clock = asyncio.get_running_loop().time
        end = clock() + allowed_s(http, options.timeout_s)

        async def work(body: bytes) -> bytes:
            request = parse(body)
            search = search_of(request)
            outcomes = await search(request.texts(), request.limit(options.topk), end - clock())
            return _reply(http, request, outcomes)

        return json_response(await answer_in_time(http, options.timeout_s, work), headers)

    # The routes differ only in how they parse a request, and in the reply that it asks for.
    @router.post("/retrieve", openapi_extra=schema_of(retrieve_model), responses=RESPONSES)
    async def retrieve(http: Request) -> Response:
        """Passages for a list of queries (Search-R1, verl) or for one query (SkyRL)."""
        return await answer(http, lambda body: parse(retrieve_model, body))

    @router.post(
        "/search",
        openapi_extra=schema_of(FlashRagRequest),
        responses=RESPONSES | {400: {"description": "The query is empty."}},
    )
    async def search_one(http: Request) -> Response:
        """Passages for one query, as FlashRAG serves them."""
        return await answer(http, _parse_not_empty)

    @router.post("/batch_search", openapi_extra=schema_of(FlashRagBatchRequest), responses=RESPONSES)
    async def search_many(http: Request) -> Response:
        """Passages for a list of queries, as FlashRAG serves them."""
        return await answer(http, lambda body: parse(FlashRagBatchRequest, body))

    return router


def page_router(source: Served, options: SearchOptions) -> APIRouter:
    """The route `/page`: the page of a passage, for a source that has pages."""
    router, headers = APIRouter(route_class=RawRoute), reply_headers(source)

    @router.post(
        "/page",
        openapi_extra=schema_of(PageRequest),
        responses=_PAGE_RESPONSES,
    )
    async def page(http: Request) -> Response:
        """The page to which a passage belongs: the passages of its title, in their order."""

        async def work(body: bytes) -> bytes:
            request = parse(PageRequest, body)
            # Sources without pages have the route as well, so that the 404 says why, which one for no route would not.
            if not isinstance(source, HasPages):
                raise HTTPException(404, f"{source.name} has no pages; /page needs a server with a corpus")
            found = await source.page(request.id, request.max_chars)
            return json.dumps({"page": found and asdict(found)}, ensure_ascii=False).encode()

        return json_response(await answer_in_time(http, options.timeout_s, work), headers)

    return router


def parse(model: type[Model], body: bytes) -> Model:
    """The request in `body`. Raises `HTTPException` 422 if it is invalid."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, explain(error, model.model_fields)) from error


def _reply(http: Request, request: SearchRequest, outcomes: Sequence[Outcome]) -> bytes:
    """The reply, with the errors of single queries if the client asked for them. Otherwise raises the first one."""
    wants_each = any(name == EACH_HEADER and value == b"each" for name, value in http.scope["headers"])
    if not (wants_each and isinstance(request, RetrieveRequest)):
        return request.reply(hits_or_raise(outcomes))
    failed = [outcome for outcome in outcomes if isinstance(outcome, SearchError)]
    http.scope[FAILED_QUERIES] = len(failed)
    if failed:
        _LOG.warning("%d of %d queries failed; the first: %s", len(failed), len(outcomes), failed[0])
    return request.reply(outcomes)


def _parse_not_empty(body: bytes) -> FlashRagRequest:
    request = parse(FlashRagRequest, body)
    if not request.query.strip():
        raise HTTPException(400, "Query content cannot be empty")  # the text that FlashRAG's clients know
    return request
