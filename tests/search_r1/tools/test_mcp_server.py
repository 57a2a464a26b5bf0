"""The tools of MCP servers: real servers of the official SDK, over stdin and stdout and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import chat_tokenizer
from e2e_world import free_port

from verl.agent.tools import CallResult, ToolCall, ToolSet, load_tools, run_calls
from verl.errors import ConfigError, EnvironmentUnavailable
from verl.protocol import Prompt

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mcp") is None, reason="the package mcp is not installed (extra retrieval-mcp)"
)

PROGRAM = str(Path(__file__).with_name("mcp_program.py"))
OLD_PROGRAM = str(Path(__file__).with_name("mcp_old_program.py"))
STDIO = {"command": sys.executable, "args": [PROGRAM]}
TOKENIZER = chat_tokenizer()
Load = Callable[..., ToolSet]
ID = ("process_id", {})


@pytest.fixture
def load() -> Iterator[Load]:
    """`load(server, **options)` gives the tools of a server; they are closed at the end."""
    loaded: list[ToolSet] = []

    def start(server: Any, **options: Any) -> ToolSet:
        loaded.append(load_tools([{"mcp": server, "options": options}]))
        return loaded[-1]

    yield start
    for tools in loaded:
        asyncio.run(tools.close())


@pytest.fixture
def start_server() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the program, or another one, over HTTP on a port."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(port: int, program: str = PROGRAM) -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen([sys.executable, program, str(port)], stderr=subprocess.DEVNULL))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest, start_server: Callable[[int], subprocess.Popen[bytes]]) -> Any:
    """The entry of a server of either kind."""
    if request.param == "stdio":
        return STDIO
    port = free_port()
    start_server(port)
    return {"url": f"http://127.0.0.1:{port}/mcp"}


@pytest.fixture
def old_server(start_server: Callable[..., subprocess.Popen[bytes]]) -> str:
    """The address of a server that sends event streams, and whatever results it likes."""
    port = free_port()
    start_server(port, OLD_PROGRAM)
    return f"http://127.0.0.1:{port}/mcp"


def load_patiently(load: Load, server: Any, **options: Any) -> ToolSet:
    """The tools of a server that may not listen yet."""
    end = time.monotonic() + 120
    while True:
        try:
            return load(server, **options)
        except EnvironmentUnavailable:
            assert time.monotonic() < end
            time.sleep(0.2)


def run(tools: ToolSet, *calls: tuple[str, Any]) -> list[CallResult]:
    async def turn() -> list[CallResult]:
        opened = await tools.open(Prompt((1,), "test", {}))
        return await run_calls(opened, [ToolCall(*call) for call in calls], TOKENIZER)

    return asyncio.run(turn())


def test_tools_are_listed_and_called_at_once(load: Load, server: Any) -> None:
    tools = load_patiently(load, server)
    asyncio.run(tools.check())
    names = [made["function"]["name"] for made in tools.schemas()]
    assert names == ["add", "slow", "fail", "crash", "refuse", "die", "fragile", "hang", "complain", "process_id"]
    first = tools.schemas()[0]["function"]
    assert first["description"] == "Add two numbers."
    assert first["parameters"]["properties"]["first"]["description"] == "the first number"
    results = run(
        tools,
        ("slow", {"seconds": 0.3}),
        ("add", {"first": 1, "second": 2}),
        ("add", {"second": 2}),
        ("fail", {"why": "no such file"}),
        ("process_id", {}),
        ("crash", {}),
    )
    assert [result.status for result in results] == ["ok", "ok", "invalid_arguments", "error", "ok", "error"]
    assert [result.text for result in results[:2]] == ["waited", "3"]
    assert "'first' is a required property" in results[2].text
    assert "no such file" in results[3].text
    assert int(results[4].text) != os.getpid()
    # another event loop, the same connection
    assert run(tools, ("process_id", {}))[0].text == results[4].text


def test_a_call_that_takes_too_long_is_the_policys_if_the_server_lives(load: Load, server: Any) -> None:
    tools = load_patiently(load, server, timeout_s=2)
    slow, fast = run(tools, ("slow", {"seconds": 60}), ("add", {"first": 1}))
    assert (slow.status, slow.text) == ("error", "Error: this took longer than 2 s and was stopped")
    assert fast.text == "1"
    assert run(tools, ("add", {"first": 2}))[0].text == "2"


@pytest.mark.parametrize("code", [-32603, -32601, -32602, -1])
def test_an_error_of_the_protocol_is_the_reply_to_its_call_alone(load: Load, code: int) -> None:
    """The server lives, and another call goes on."""
    tools = load(STDIO)
    refused, slow, (before,) = *run(tools, ("refuse", {"code": code}), ("slow", {"seconds": 0.5})), run(tools, ID)
    assert refused.status == "error" and "there is no such city" in refused.text
    assert (slow.status, slow.text) == ("ok", "waited")
    assert run(tools, ID)[0].text == before.text


def test_over_http_such_an_error_may_be_that_of_a_proxy(
    load: Load, start_server: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    """It is infrastructure, of that call alone."""
    port = free_port()
    start_server(port)
    tools = load_patiently(load, {"url": f"http://127.0.0.1:{port}/mcp"})
    with pytest.raises(EnvironmentUnavailable, match="there is no such city"):
        run(tools, ("refuse", {"code": -32603}))
    assert run(tools, ("add", {"first": 1}))[0].text == "1"


def test_a_result_against_its_own_schema_is_the_reply_to_its_call_alone(load: Load, old_server: str) -> None:
    """The connection stays, and with it the calls that are in progress."""
    tools = load_patiently(load, old_server)

    async def turns() -> list[CallResult]:
        opened = await tools.open(Prompt((1,), "test", {}))
        waiting = asyncio.ensure_future(run_calls(opened, [ToolCall("meet", {"number": 2})], TOKENIZER))
        wrong = await run_calls(opened, [ToolCall("reading", {})], TOKENIZER)
        last = await run_calls(opened, [ToolCall("meet", {"number": 2})], TOKENIZER)
        return [*wrong, *await waiting, *last]

    wrong, *others = asyncio.run(turns())
    assert wrong.status == "error"
    assert wrong.text == "Error: Invalid structured content returned by tool reading: None is not of type 'number'"
    assert [(other.status, other.text) for other in others] == [("ok", "met")] * 2


def test_a_result_over_http_has_any_length(load: Load, old_server: str) -> None:
    tools = load_patiently(load, old_server, max_result_tokens=10)
    (big,) = run(tools, ("big", {"size": 1_500_000}))
    assert big.status == "ok" and big.event["cut"]


def test_calls_over_http_are_all_at_the_server_at_once(load: Load, old_server: str) -> None:
    tools = load_patiently(load, old_server, timeout_s=20)
    met = run(tools, *[("meet", {"number": 130})] * 130)
    assert {(result.status, result.text) for result in met} == {("ok", "met")}


def test_a_file_in_a_result_is_named_by_its_type(load: Load, old_server: str) -> None:
    assert run(load_patiently(load, old_server), ("page", {}))[0].text == "[resource: application/pdf]"


def test_a_server_that_hangs_is_infrastructure(load: Load) -> None:
    tools = load(STDIO, timeout_s=2)
    with pytest.raises(EnvironmentUnavailable, match="the MCP server .*mcp_program.py'? does not answer any more"):
        run(tools, ("hang", {"seconds": 30}))
    assert run(tools, ("add", {"first": 2}))[0].text == "2"  # of another process


def test_a_retriever_that_is_gone_behind_its_own_server_is_infrastructure(load: Load) -> None:
    """The server lives, and says so of its error, which the policy does not read."""
    module = ["-m", "search_r1.search.mcp_tool", "--timeout_s", "0.5"]
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    tools = load({"command": sys.executable, "args": [*module, "--url", url]})
    with pytest.raises(EnvironmentUnavailable, match=f"the MCP server .*: retriever {url} is not available"):
        run(tools, ("search", {"query_list": ["a river"]}))


def test_a_server_that_dies_fails_its_calls_and_the_next_one_starts_it_anew(load: Load) -> None:
    tools = load(STDIO)
    (before,) = run(tools, ("process_id", {}))
    with pytest.raises(EnvironmentUnavailable, match="the MCP server .*mcp_program.py"):
        run(tools, ("slow", {"seconds": 60}), ("die", {"seconds": 0.2}))
    (after,) = run(tools, ("process_id", {}))
    assert after.status == "ok" and after.text != before.text
    # killed while nobody waits
    os.kill(int(after.text), signal.SIGKILL)
    for _ in range(2):
        try:
            (last,) = run(tools, ("process_id", {}))
        except EnvironmentUnavailable:
            continue
        break
    assert last.status == "ok" and last.text not in (before.text, after.text)


def test_of_what_a_program_writes_to_stderr_only_the_end_is_kept(load: Load) -> None:
    tools = load(STDIO)
    process_id, *_ = run(tools, ID, ("complain", {"megabytes": 3}))
    run(tools, ID)
    kept = os.stat(f"/proc/{process_id.text}/fd/2").st_size
    assert kept < 2**20
    run(tools, ("complain", {"megabytes": 0}))  # it goes on at the end
    assert os.stat(f"/proc/{process_id.text}/fd/2").st_size == kept + len(" the disk is full\n")
    with pytest.raises(EnvironmentUnavailable, match="its last words: .*x the disk is full\n the disk is full$"):
        run(tools, ("die", {}))


def test_a_killed_http_server_is_unavailable_until_it_is_back(
    load: Load, start_server: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    port = free_port()
    process = start_server(port)
    tools = load_patiently(load, f"http://127.0.0.1:{port}/mcp", reconnect_timeout_s=0)

    async def killed_in_the_middle() -> None:
        opened = await tools.open(Prompt((1,), "test", {}))
        running = asyncio.ensure_future(run_calls(opened, [ToolCall("slow", {"seconds": 60})], TOKENIZER))
        await asyncio.sleep(0.5)
        process.kill()
        await running

    with pytest.raises(EnvironmentUnavailable, match=f"the MCP server http://127.0.0.1:{port}/mcp"):
        asyncio.run(killed_in_the_middle())
    process.wait()
    with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
        run(tools, ("add", {"first": 1}))
    with pytest.raises(EnvironmentUnavailable, match="cannot be reached"):
        asyncio.run(tools.check())
    start_server(port)
    end = time.monotonic() + 120
    while True:
        try:
            (back,) = run(tools, ("add", {"first": 1}))
            break
        except EnvironmentUnavailable:
            assert time.monotonic() < end
            time.sleep(0.2)
    assert back.text == "1"


def test_a_call_waits_for_a_server_that_was_lost(
    load: Load, start_server: Callable[[int], subprocess.Popen[bytes]]
) -> None:
    port = free_port()
    process = start_server(port)
    tools = load_patiently(load, f"http://127.0.0.1:{port}/mcp", reconnect_timeout_s=240)
    process.kill()
    process.wait()
    with contextlib.suppress(EnvironmentUnavailable):  # that of the first call, if nobody has noticed before
        asyncio.run(asyncio.wait_for(add_one(tools), 0.5))

    async def restarted_meanwhile() -> list[CallResult]:
        waiting = asyncio.ensure_future(asyncio.gather(add_one(tools), add_one(tools)))
        await asyncio.sleep(1.5)
        assert not waiting.done()
        start_server(port)
        return await waiting

    assert [result.text for result in asyncio.run(restarted_meanwhile())] == ["1", "1"]


async def add_one(tools: ToolSet) -> CallResult:
    opened = await tools.open(Prompt((1,), "test", {}))
    [result] = await run_calls(opened, [ToolCall("add", {"first": 1})], TOKENIZER)
    return result


def wait_for_end(process_id: str) -> None:
    end = time.monotonic() + 60
    while Path(f"/proc/{process_id}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_program_that_never_answers_is_ended(load: Load, tmp_path: Path) -> None:
    """It does not notice by itself, since it does not read its input."""
    command = ["bash", "-c", f"echo $$ > {tmp_path}/id; exec sleep 600"]
    with pytest.raises(EnvironmentUnavailable, match="no answer in 2 s"):
        load({"command": command}, start_timeout_s=2)
    wait_for_end((tmp_path / "id").read_text().strip())


def test_closing_ends_the_program(load: Load) -> None:
    tools = load(STDIO)
    (answer,) = run(tools, ("process_id", {}))
    asyncio.run(tools.close())
    wait_for_end(answer.text)
    with pytest.raises(EnvironmentUnavailable, match="its connection was closed"):
        run(tools, ("process_id", {}))


def test_options_choose_and_rename(load: Load) -> None:
    tools = load(shlex.join([sys.executable, PROGRAM]), prefix="my.", only=["add", "process.id"], max_result_tokens=7)
    assert [made.name for made in tools.tools] == ["my_add", "my_process_id"]
    assert {made.max_result_tokens for made in tools.tools} == {7}
    assert run(tools, ("my_add", {"first": 5}))[0].text == "5"


@pytest.mark.parametrize(
    ("server", "options", "kind", "message"),
    [
        (3, {}, ConfigError, "mcp is 3; write a command, an http address"),
        ({"comand": "x"}, {}, ConfigError, "mcp has the unknown key 'comand'"),
        ({"command": "x", "url": "http://a/mcp"}, {}, ConfigError, "not exactly one of command and url"),
        ({"url": "a/mcp"}, {}, ConfigError, "'a/mcp' is no http:// or https:// address"),
        ("uvx 'time", {}, ConfigError, r"mcp: \"uvx 'time\" is no command line \(No closing quotation\)"),
        ({"command": 3}, {}, ConfigError, r"mcp: command is a int; write a text or \[word, ...\]"),
        ({"command": "uvx", "args": "time"}, {}, ConfigError, r"mcp: args is a str; write \[word, ...\]"),
        ({"command": "uvx", "env": ["A=1"]}, {}, ConfigError, "mcp: env is a list; write {NAME: value}"),
        ({"url": "http://a/mcp", "headers": ["A: 1"]}, {}, ConfigError, "mcp: headers is a list; write {name: value}"),
        (STDIO, {"only": ["subtract"]}, ConfigError, "has no tool 'subtract'; it has add, slow"),
        (STDIO, {"only": "add"}, ConfigError, r"only is 'add'; write a list of tools: \[add\]"),
        (STDIO, {"timeout_s": "5"}, ConfigError, "timeout_s is '5'; write a number of seconds"),
        (STDIO, {"time_s": 1}, ConfigError, r"agent.tools\[0\]: .* cannot be made .*'time_s'"),
        # Permission is denied where a folder of PATH is another user's.
        ("no-such-program-of-mine x", {}, EnvironmentUnavailable, "cannot be reached .*(No such file|denied)"),
        (
            {"command": sys.executable, "args": [PROGRAM, "broken"]},
            {},
            EnvironmentUnavailable,
            "cannot be reached .*; its last words: no licence was found",
        ),
        ("http://127.0.0.1:9/mcp", {}, EnvironmentUnavailable, "http://127.0.0.1:9/mcp cannot be reached"),
        ("sleep 600", {"start_timeout_s": 0.5}, EnvironmentUnavailable, "cannot be reached .no answer in 0.5 s"),
    ],
)
def test_a_server_that_cannot_be_used(
    load: Load, server: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load(server, **options)
