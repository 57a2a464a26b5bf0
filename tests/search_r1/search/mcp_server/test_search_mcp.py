"""The search as an MCP tool, asked by the SDK's own client over both transports."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import requests
from e2e_world import free_port
from search_corpora import write_rows
from search_scheduling import GatedRetriever, Stage
from search_servers import PATIENCE_S, running_app, served, wait_until
from starlette.responses import JSONResponse

from search_r1.errors import INFRASTRUCTURE
from search_r1.llm_agent.observations import format_passage
from search_r1.search.bm25.index import Bm25Retriever
from search_r1.search.corpus import Corpus
from search_r1.search.mcp_server import tool as mcp_tool
from search_r1.search.retrieval_app import create_app
from search_r1.search.server.app import AppOptions
from search_r1.search.server.retrieval_service import RetrievalService, ServiceOptions

_INSTALLED = importlib.util.find_spec("mcp") is not None
pytestmark = pytest.mark.skipif(not _INSTALLED, reason="the package mcp is not installed (extra retrieval-mcp)")

Ask = Callable[[Any], Awaitable[Any]]

MORN = '"Morn"\nMorn is a city in the country of Tarsia. Its river is the Lune.'
VELT = '"Anna Velt"\nAnna Velt was born in the city of Morn and paints rivers.'
TARSIA = '"Tarsia"\nTarsia is a country whose capital is Osk.'
TOKEN = "s3cret"
ERAS = ("auto", "legacy")  # the protocol of 2026, without a handshake, and the ones before


def over_http(url: str, ask: Ask, mode: str = "auto", token: str | None = None) -> Any:
    """What `ask(client)` gives."""
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async def run() -> Any:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=PATIENCE_S) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http), mode=mode) as client,
        ):
            return await ask(client)

    return asyncio.run(run())


def over_stdio(url: str, ask: Ask, environment: dict[str, str], mode: str, *arguments: str) -> Any:
    """What `ask(client)` gives, from a program that passes on to `url`."""
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    command = ["-m", "search_r1.search.mcp_tool", "--url", f"{url}/retrieve", *arguments]
    program = StdioServerParameters(command=sys.executable, args=command, env=environment)

    async def run() -> Any:
        async with Client(stdio_client(program), mode=mode) as client:
            return await ask(client)

    return asyncio.run(run())


def over_memory(url: str, ask: Ask, *arguments: str) -> Any:
    """What `ask(client)` gives, from that program run in this process: memory is its stdin and stdout."""
    import mcp.server.stdio
    from mcp import Client
    from mcp.shared.memory import create_client_server_memory_streams

    @asynccontextmanager
    async def program() -> AsyncIterator[Any]:
        async with create_client_server_memory_streams() as (of_client, of_server):
            arguments_read = mcp_tool.parse_arguments(["--url", f"{url}/retrieve", *arguments])
            with mock.patch.object(mcp.server.stdio, "stdio_server", lambda: nullcontext(of_server)):
                running = asyncio.create_task(mcp_tool._serve_stdio(arguments_read))
                yield of_client
        await running

    async def run() -> Any:
        async with Client(program()) as client:
            return await ask(client)

    return asyncio.run(run())


def search(*queries: str, **more: object) -> Ask:
    return lambda client: client.call_tool("search", {"query_list": list(queries), **more})


def error_of(result: Any, infrastructure: bool = True) -> str:
    """The message of a failed call, which has nothing else but a mark, unless the caller is to blame."""
    assert result.is_error and result.structured_content is None
    assert (result.meta or {}).get(INFRASTRUCTURE, False) is infrastructure
    (content,) = result.content
    return content.text


@pytest.fixture(scope="module")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    passages = {"p10": VELT, "p20": MORN, "p50": TARSIA}
    rows = ({"id": name, "contents": text} for name, text in passages.items())
    return write_rows(tmp_path_factory.mktemp("mcp") / "corpus.jsonl", *rows)


@pytest.fixture(scope="module")
def words(corpus_path: Path) -> Iterator[str]:
    """A server over real BM25, 2 passages a query by default."""
    with served("--corpus_path", str(corpus_path), "--retriever_name", "bm25", "--topk", "2", "--mcp") as url:
        yield url


@pytest.fixture
def stage(corpus_path: Path) -> Iterator[Callable[..., Stage]]:
    """A server whose searches wait: `stage(timeout_s, **limits)`. Its warm-up has passed."""
    corpus = Corpus(corpus_path)
    retriever = GatedRetriever(len(corpus))
    servers = ExitStack()

    def start(timeout_s: float = PATIENCE_S, **limits: Any) -> Stage:
        service = RetrievalService(retriever, corpus, ServiceOptions(**{"max_wait_ms": 0.0} | limits))
        options = AppOptions(timeout_s=timeout_s, mcp=True)
        url, _ = servers.enter_context(running_app(create_app(service, options, service.metrics)))
        made = Stage(url, retriever, service)
        retriever.let_pass()
        made.wait_for_batches(1)
        return made

    yield start
    retriever.open()
    servers.close()


@pytest.mark.parametrize(
    ("transport", "mode"), [("http", "auto"), ("http", "legacy"), ("stdio", "legacy"), ("memory", "auto")]
)
def test_the_tool_is_listed_and_answers(
    words: str, corpus_path: Path, server_environment: dict[str, str], transport: str, mode: str
) -> None:
    async def ask(client: Any) -> Any:
        listed = await client.list_tools()
        return listed.tools, await client.call_tool("search", {"query_list": ["river of Morn", "zyxxy", "capital"]})

    if transport == "http":
        (tool,), result = over_http(words, ask, mode)
    elif transport == "stdio":
        (tool,), result = over_stdio(words, ask, server_environment, mode, "--topk", "2")
    else:
        (tool,), result = over_memory(words, ask, "--topk", "2")
    assert tool.name == "search" and tool.input_schema["required"] == ["query_list"]
    assert set(tool.input_schema["properties"]) == {"query_list", "topk"}
    assert not result.is_error
    (content,) = result.content
    assert content.text == (
        'Doc 1(Title: "Morn") Morn is a city in the country of Tarsia. Its river is the Lune.\n'
        'Doc 2(Title: "Anna Velt") Anna Velt was born in the city of Morn and paints rivers.\n'
        "---\n"
        "No passages were found.\n"
        "---\n"
        'Doc 1(Title: "Tarsia") Tarsia is a country whose capital is Osk.'
    )
    corpus = Corpus(corpus_path)
    (morn, velt), _, (tarsia,) = Bm25Retriever.build(corpus).search(["river of Morn", "zyxxy", "capital"], 2)
    rivers = [
        {"id": "p20", "title": "Morn", "contents": MORN, "score": morn.score},
        {"id": "p10", "title": "Anna Velt", "contents": VELT, "score": velt.score},
    ]
    capitals = [{"id": "p50", "title": "Tarsia", "contents": TARSIA, "score": tarsia.score}]
    found = {"river of Morn": rivers, "zyxxy": [], "capital": capitals}
    results = [{"query": query, "passages": passages} for query, passages in found.items()]
    assert result.structured_content == {"results": results}


def test_a_document_reads_as_in_training_and_topk_is_obeyed(words: str) -> None:
    for over, default in ((over_http, 2), (over_memory, 3)):
        assert over(words, search("city of Morn", topk=1)).content[0].text + "\n" == format_passage(1, MORN)
        found = over(words, search("city of Morn in Tarsia"))
        assert len(found.structured_content["results"][0]["passages"]) == default


def test_ids_of_another_server_are_texts(run_app: Callable[..., str]) -> None:
    """It may send numbers, as they are in its corpus, or none."""
    documents = [{"id": 7, "contents": "A\nx"}, {"id": "p8", "contents": "B\ny"}, {"contents": "C\nz"}]
    url = run_app(JSONResponse({"result": [documents]}))
    (found,) = over_memory(url, search("q")).structured_content["results"]
    assert [passage["id"] for passage in found["passages"]] == ["7", "p8", None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "query_list: Field required"),
        ({"query_list": "Morn"}, "query_list: Input should be a valid list"),
        ({"query_list": []}, "query_list: List should have at least 1 item after validation, not 0"),
        ({"query_list": ["a", 3]}, "query_list.1: Input should be a valid string"),
        ({"query_list": ["a"], "topk": 101}, "topk: Input should be less than or equal to 100"),
        ({"query_list": ["a" * 32_769]}, "query_list.0: String should have at most 32768 characters"),
    ],
)
def test_bad_arguments_are_a_tool_error(words: str, arguments: dict, message: str) -> None:
    assert error_of(over_http(words, lambda client: client.call_tool("search", arguments)), False) == message


def test_an_unknown_tool_is_a_protocol_error(words: str) -> None:
    from mcp import MCPError

    with pytest.raises(ExceptionGroup) as refused:
        over_http(words, lambda client: client.call_tool("find", {}))
    assert refused.group_contains(MCPError, match="no tool 'find'; use 'search'")


@pytest.mark.parametrize("mode", ERAS)
def test_a_failed_search_is_a_tool_error_and_counted(stage, mode: str) -> None:
    gated = stage()
    gated.retriever.open()
    assert "the gated retriever failed: RuntimeError: a poisoned query" in error_of(
        over_http(gated.url, search("q 1", "poison"), mode)
    )
    assert gated.value("retrieval_errors_total") == 1
    result = over_http(gated.url, search("q 1"), mode)
    assert result.structured_content["results"][0]["passages"][0]["score"] == 1.0


def test_a_late_answer_is_a_tool_error(stage) -> None:
    gated = stage(timeout_s=0.3)
    assert error_of(over_http(gated.url, search("q 1"))) == "not answered within the deadline of 0.3 s"
    assert gated.value("retrieval_expired_total") == 1


def test_a_full_queue_is_a_tool_error(stage) -> None:
    gated = stage(max_queue=1)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(gated.ask, "q 1")
        gated.wait_for_batches(2)
        pool.submit(gated.ask, "q 2")
        gated.wait_for_queue(1)
        message = error_of(over_http(gated.url, search("q 3")))
        gated.retriever.open()
    assert message == "1 queries are queued and the limit is 1; try again in 1 s"
    assert gated.value("retrieval_rejected_total") == 1


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
def test_a_client_that_leaves_takes_its_query_out_of_the_queue(stage, version: str) -> None:
    gated = stage()
    meta = {"protocolVersion": version, "clientCapabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {
            "name": "search",
            "arguments": {"query_list": ["q 2"]},
            "_meta": {f"io.modelcontextprotocol/{key}": value for key, value in meta.items()},
        },
    }
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": version,
        "Mcp-Method": "tools/call",
        "Mcp-Name": "search",
    }
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gated.ask, "q 1")
        gated.wait_for_batches(2)
        leaving = http.client.HTTPConnection(gated.url.removeprefix("http://"), timeout=PATIENCE_S)
        leaving.request("POST", "/mcp", json.dumps(call), headers | {"Content-Type": "application/json"})
        gated.wait_for_queue(1)
        leaving.close()
        wait_until(lambda: gated.value("retrieval_gone_total") == 1)
        gated.wait_for_queue(0)
        gated.retriever.open()
    answered = requests.post(f"{gated.url}/mcp", json=call, headers=headers, timeout=PATIENCE_S).json()
    assert answered["result"]["structuredContent"]["results"][0]["passages"][0]["score"] == 2.0
    assert gated.retriever.batches[1:] == [["q 1"], ["q 2"]]  # once: not for the one who left


def test_a_server_that_is_not_there_is_a_tool_error() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    message = error_of(over_memory(url, search("q"), "--timeout_s", "0.5"))
    assert message.startswith(f"retriever {url}/retrieve is not available") and "retrieval_launch.sh" in message


def test_the_token_of_the_server_guards_the_tool(serve, corpus_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcp import MCPError

    bm25 = ("--corpus_path", str(corpus_path), "--retriever_name", "bm25")
    url = serve(*bm25, "--mcp", "--auth_token", TOKEN)
    assert requests.post(f"{url}/mcp", json={}, timeout=PATIENCE_S).status_code == 401
    with pytest.raises(ExceptionGroup) as refused:
        over_http(url, search("Osk"))
    assert refused.group_contains(MCPError, match="Server returned an error response")
    assert over_http(url, search("Osk"), token=TOKEN).content[0].text + "\n" == format_passage(1, TARSIA)
    assert "HTTP 401" in error_of(over_memory(url, search("Osk")))
    monkeypatch.setenv("RETRIEVAL_AUTH_TOKEN", TOKEN)
    assert over_memory(url, search("Osk")).content[0].text + "\n" == format_passage(1, TARSIA)
    metrics = requests.get(f"{url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S).text
    assert 'retrieval_requests_total{route="/mcp",status="200"}' in metrics


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "search.example.org"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "http://localhost:6274"}, 200),
        ({"Host": "search.example.org", "Origin": "http://search.example.org"}, 403),
        ({"Origin": "http://[::1]:6274"}, 200),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://[::1"}, 403),
    ],
)
def test_no_foreign_web_page_uses_it(words: str, headers: dict, status: int) -> None:
    assert list_tools(words, headers) == status


def test_with_a_token_it_has_any_name_but_no_foreign_web_page(serve, corpus_path: Path) -> None:
    url = serve("--corpus_path", str(corpus_path), "--retriever_name", "bm25", "--mcp", "--auth_token", TOKEN)
    known = {"Host": "search.example.org", "Authorization": f"Bearer {TOKEN}"}
    assert list_tools(url, known) == 200
    assert list_tools(url, known | {"Origin": "http://search.example.org"}) == 403


def list_tools(url: str, headers: dict[str, str]) -> int:
    accept = {"Accept": "application/json, text/event-stream"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    return requests.post(f"{url}/mcp", json=body, headers=accept | headers, timeout=PATIENCE_S).status_code


def test_there_is_no_stream_to_hold_open(words: str) -> None:
    reply = requests.get(f"{words}/mcp", headers={"Accept": "text/event-stream"}, timeout=PATIENCE_S)
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"
