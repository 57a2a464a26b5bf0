"""The search as a tool of the Model Context Protocol (MCP), over any `Source`.

    .venv/bin/python -m search_r1.search.mcp_tool --url http://127.0.0.1:8000/retrieve

speaks MCP on stdin and stdout and forwards the queries to a running server; `retrieval_server --mcp` offers the same
tool over HTTP (`http.py`). Needs the extra `retrieval-mcp`.

Uses the SDK's `Server`, not its `MCPServer`, which hides why a search failed and echoes the request.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from program_end import exit_status
from search_r1.errors import INFRASTRUCTURE, SearchError, SearchFailed, ServerError, ServiceUnavailable
from search_r1.http.client import addresses_of, check_addresses
from search_r1.http.gate import Metrics
from search_r1.search.client import RetrievalClient
from search_r1.search.server.routes import SearchOptions
from search_r1.search.server.source_interface import ScoredPassage, Source
from search_r1.search.server.wire import MAX_TOPK, Queries, explain
from url_text import without_credentials

_LOG = logging.getLogger(__name__)
logging.getLogger("mcp").setLevel(logging.WARNING)  # the SDK logs every request
_DESCRIPTION = "Search a text collection. Gives the best passages for each query, best first."
_NOTHING = "No passages were found."


class SearchArguments(BaseModel):
    """The queries, and the number of passages for each; unknown arguments are ignored."""

    query_list: Queries = Field(min_length=1, description="the queries, each a question or keywords")
    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK, description="passages per query; null: the default")


class FoundPassage(BaseModel):
    """`contents` is that of the corpus row; its first line, without quotes, is `title`."""

    id: str | None = Field(description="null when the server sends none")
    title: str
    contents: str
    score: float | None = Field(description="higher is better; null when the server sends none")


class QueryResult(BaseModel):
    """The passages of one query, best first."""

    query: str
    passages: list[FoundPassage]


class SearchResult(BaseModel):
    """The structured content of an answer, in the order of the queries."""

    results: list[QueryResult]


def search_server(source: Source, options: SearchOptions, metrics: Metrics) -> Any:
    """An `mcp.server.Server` with the tool `search`. A failed search is a tool error, never passages; unless the
    arguments are to blame, `INFRASTRUCTURE` is in its `_meta`.

    Raises `ServerError` without the package `mcp`.
    """
    # What a client reads about the tool.
    types = sdk_module("mcp_types")
    tool = types.Tool(
        name="search",
        description=_DESCRIPTION,
        input_schema=SearchArguments.model_json_schema(),
        output_schema=SearchResult.model_json_schema(),
        annotations=types.ToolAnnotations(read_only_hint=True),
    )

    async def list_tools(_context: Any, _params: Any) -> Any:
        return types.ListToolsResult(tools=[tool])

    # An error of the search is for the model to read; only a wrong name is an error of the protocol.
    async def call_tool(_context: Any, params: Any) -> Any:
        if params.name != tool.name:
            raise sdk_module("mcp").MCPError(types.INVALID_PARAMS, f"no tool {params.name!r}; use {tool.name!r}")
        try:
            checked = SearchArguments.model_validate(params.arguments or {})
        except ValidationError as error:  # told without quoting the arguments
            return types.CallToolResult(content=[types.TextContent(text=explain(error))], is_error=True)
        try:
            result = await _search(source, options, metrics, checked)
        except SearchError as error:
            said = [types.TextContent(text=str(error))]
            return types.CallToolResult(content=said, is_error=True, _meta={INFRASTRUCTURE: True})
        return types.CallToolResult(
            content=[types.TextContent(text=format_result(result))], structured_content=result.model_dump()
        )

    return sdk_module("mcp.server").Server("retrieval", on_list_tools=list_tools, on_call_tool=call_tool)


async def _search(source: Source, options: SearchOptions, metrics: Metrics, asked: SearchArguments) -> SearchResult:
    """Search within the time of one request; counts failures as the routes do. Raises `SearchError`."""
    try:
        async with asyncio.timeout(options.timeout_s):
            found = await source.search(asked.query_list, asked.topk or options.topk)
    except TimeoutError as error:
        metrics.expired.inc()
        raise SearchFailed(f"not answered within the deadline of {options.timeout_s:g} s") from error
    except ServiceUnavailable:
        metrics.rejected.inc()
        raise
    except SearchError as error:
        metrics.errors.inc()
        _LOG.error("search failed: %s", error)
        raise
    # The structured content, from which the text is made as well.
    results = []
    for query, hits in zip(asked.query_list, found, strict=True):
        passages = []
        for row, score in hits:
            title = row["contents"].partition("\n")[0].strip().strip('"')
            name = None if row["id"] is None else str(row["id"])  # other servers send numbers as they are in the corpus
            passages.append(FoundPassage(id=name, title=title, contents=row["contents"], score=score))
        results.append(QueryResult(query=query, passages=passages))
    return SearchResult(results=results)


def format_result(result: SearchResult) -> str:
    """The result as text: documents as this project's search agent sees them, a line `---` between queries."""
    texts = []
    for found in result.results:
        documents = []
        for number, passage in enumerate(found.passages, start=1):
            title, _, text = passage.contents.partition("\n")
            documents.append(f"Doc {number}(Title: {title}) {text}")
        texts.append("\n".join(documents) or _NOTHING)
    return "\n---\n".join(texts)


def sdk_module(name: str) -> Any:
    """A module of the MCP SDK. Raises `ServerError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ServerError(
            f"MCP needs the package mcp 2 ({error}); .venv/bin/pip install -e '.[retrieval-mcp]'"
        ) from error


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of the program on stdin and stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.search.mcp_tool",
        description="Offer the search of a running retrieval server as an MCP tool on stdin and stdout.",
    )
    parser.add_argument("--url", required=True, help="/retrieve of a retrieval server; several are separated by commas")
    parser.add_argument("--topk", type=int, default=3, help="passages per query when the call does not say")
    parser.add_argument(
        "--timeout_s", type=float, default=30, help="maximum time for a call with its retries, in seconds"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stdin ends. Returns the exit status, as `exit_status` says."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    return exit_status(lambda: asyncio.run(_serve_stdio(arguments)), when_interrupted="")


async def _serve_stdio(arguments: argparse.Namespace) -> None:
    stdio_server = sdk_module("mcp.server.stdio").stdio_server
    source = HttpSource(arguments.url, arguments.timeout_s)  # it keeps the time, and says what it waited for
    server = search_server(source, SearchOptions(arguments.topk, math.inf), Metrics())
    try:
        async with stdio_server() as (incoming, outgoing):
            await server.run(incoming, outgoing, server.create_initialization_options())
    finally:
        await source.close()


class HttpSource:
    """A running server as a `Source`. Score and id are None if it sends none."""

    num_passages: int | None = None
    version = ""  # that of the server, which may change
    batch_size: int | None = None

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` bounds a search with its retries. Raises `ValueError` if `url` is not an address."""
        check_addresses(addresses_of(url))
        self.name, self._url, self._timeout_s = without_credentials(url), url, timeout_s
        self._clients: dict[int, RetrievalClient] = {}  # by topk, which a client has one of

    async def search(self, queries: list[str], k: int) -> list[list[ScoredPassage]]:
        """See `Source.search`. Raises `RetrieverError`."""
        if k not in self._clients:
            self._clients[k] = RetrievalClient(self._url, topk=k, deadline_s=self._timeout_s)
        answers = await asyncio.gather(*map(self._clients[k].search, queries))
        return [[(passage, passage["score"]) for passage in passages] for passages in answers]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()
