"""The tools of any server of the Model Context Protocol (MCP), by the official SDK: a program on stdin and stdout, or
an address over streamable HTTP.

    {"mcp": {"command": "uvx", "args": ["mcp-server-time"]}}
    {"mcp": {"url": "http://127.0.0.1:9000/mcp", "headers": {"Authorization": "Bearer ..."}}}

The connection lives in a thread with an event loop of its own, so that any loop of the process can use it, and what the
SDK does blocks no episode. A server that dies fails the calls that it has not answered; the next ones connect again, to
a program by starting it anew, and wait for a server that is not back yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import re
import shlex
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from search_r1.errors import INFRASTRUCTURE
from search_r1.http.client import is_http_address, is_loopback
from url_text import refused_address, without_credentials
from verl.agent.tools.definition import ArgumentChecker, Tool, ToolError, ToolProvider, ToolResult
from verl.errors import ConfigError, EnvironmentUnavailable

T = TypeVar("T")

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_LIVES_S = 5.0  # how long a server may take to say that it lives, after a call took too long
_CLOSE_S = 15.0
_SLACK_S = 30.0
_LOOK_S = 0.5  # between attempts to reach a server that was lost
_SHOWN_CHARS = 500
_MOST_ERRORS = 2**20  # bytes of what a program writes to stderr; then all but its end is removed
_KEYS = ("command", "args", "env", "cwd", "url", "headers")
_FORMS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "command": ((str, list, tuple), "a text or [word, ...]"),
    "args": ((list, tuple), "[word, ...]"),
    "env": ((Mapping,), "{NAME: value}"),
    "headers": ((Mapping,), "{name: value}"),
}


@dataclass(frozen=True)
class ServerAddress:
    """How to reach a server: a command with its environment, or a URL with headers."""

    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, server: Any) -> ServerAddress:
        """An address or a command as text, or a mapping as clients of MCP have it. Raises `ConfigError`."""
        if isinstance(server, str):
            server = {"url": server} if is_http_address(server) else {"command": server}
        if not isinstance(server, Mapping):
            raise ConfigError(f"mcp is {server!r}; write a command, an http address, or a mapping with one of them")
        unknown = [str(key) for key in server if key not in _KEYS]
        if unknown or bool(server.get("command")) == bool(server.get("url")):
            what = f"the unknown key {unknown[0]!r}" if unknown else "not exactly one of command and url"
            raise ConfigError(f"mcp has {what}; write {{command: ..., args: [...]}} or {{url: ...}}")
        for name, (kinds, form) in _FORMS.items():
            if server.get(name) and not isinstance(server[name], kinds):
                raise ConfigError(f"mcp: {name} is a {type(server[name]).__name__}; write {form}")
        if server.get("url"):
            if not is_http_address(str(server["url"])):
                raise ConfigError(f"mcp: {refused_address(str(server['url']))!r} is no http:// or https:// address")
            return cls(url=str(server["url"]), headers=dict(server.get("headers") or {}))
        # A text without `args` is a command line, split as a shell does it. With `args` it is the program alone, and
        # its path may have spaces.
        command = server["command"]
        try:
            words = shlex.split(command) if isinstance(command, str) and not server.get("args") else command
        except ValueError as error:
            raise ConfigError(f"mcp: {command!r} is no command line ({error}); close the quotation") from error
        words = [words] if isinstance(words, str) else words
        arguments = [str(word) for word in (*words, *(server.get("args") or ()))]
        variables = {str(name): str(value) for name, value in (server.get("env") or {}).items()}
        return cls(tuple(arguments), variables, server.get("cwd"))

    def __str__(self) -> str:
        return without_credentials(self.url) or shlex.join(self.command)


class McpServer(ToolProvider):
    """A server and its tools, which are listed when it is made. Use from any thread and event loop."""

    def __init__(
        self,
        server: Any,
        prefix: str = "",
        only: Sequence[str] | None = None,
        timeout_s: float = 60.0,
        max_result_tokens: int | None = None,
        start_timeout_s: float = 60.0,
        reconnect_timeout_s: float = 30.0,
    ) -> None:
        """`server`: see the module. `prefix` is put before the names of the tools, `only` selects some by the server's
        names. `timeout_s` bounds a call, `start_timeout_s` connecting and listing, both in seconds. A server that was
        lost has `reconnect_timeout_s` seconds to be back, in which calls wait for it.

        Raises `ConfigError` for a wrong setting or schema or without the package `mcp`, and `EnvironmentUnavailable`
        if the server does not answer.
        """
        _sdk("mcp")
        address = ServerAddress.read(server)
        # Wrong settings are refused before a thread and a program are started.
        limits = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        for name, value in (limits | {"reconnect_timeout_s": reconnect_timeout_s}).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"the MCP server {address}: {name} is {value!r}; write a number of seconds")
        if isinstance(only, str):
            raise ConfigError(f"the MCP server {address}: only is {only!r}; write a list of tools: [{only}]")
        self._connection = _Connection(address, start_timeout_s, reconnect_timeout_s)
        try:
            # The connection runs from here on, and without an object nobody could close it: every error must.
            listed = self._connection.listed()
            names = [tool.name for tool in listed]
            missing = [name for name in only or () if name not in names]
            if missing or not listed:
                what = f"has no tool {missing[0]!r}; it has {', '.join(names)}" if missing else "has no tools"
                raise ConfigError(f"the MCP server {self._connection.name} {what}")
            self.tools = [
                McpTool(self._connection, tool, prefix, timeout_s, max_result_tokens)
                for tool in listed
                if only is None or tool.name in only
            ]
        except BaseException:
            self._connection.close()
            raise

    async def check(self) -> None:
        """See `ToolProvider.check`: asks the server for its tools."""
        await self._connection.ask(_list_all, _SLACK_S)

    async def close(self) -> None:
        """Disconnect; a program that was started ends."""
        await asyncio.to_thread(self._connection.close)


class McpTool(Tool):
    """A tool of a server."""

    def __init__(
        self, connection: _Connection, listed: Any, prefix: str, timeout_s: float, max_result_tokens: int | None
    ) -> None:
        self.name = _NOT_IN_NAMES.sub("_", prefix + listed.name)
        self.description = listed.description or listed.title or listed.name
        self.parameters = {"type": "object", "properties": {}} | listed.input_schema
        ArgumentChecker(self.parameters, f"the MCP server {connection.name}: tool {listed.name}")
        # The server's answer is waited for here, which can tell a slow call from a server that hangs.
        self.timeout_s, self._call_s = None, timeout_s
        self.max_result_tokens = max_result_tokens
        self._connection, self._own_name = connection, listed.name

    async def call(self, arguments: dict[str, Any]) -> ToolResult:
        """See `Tool.call`. A call that takes too long raises `ToolError` if the server still lives, and an error that
        the server itself calls `INFRASTRUCTURE`, as the retrieval server does, `EnvironmentUnavailable`.
        """

        async def ask(client: Any) -> Any:
            return await client.call_tool(self._own_name, arguments, read_timeout_seconds=self._call_s)

        result = await self._connection.ask(ask, self._call_s)
        text = _text_of(result)
        if result.is_error and (result.meta or {}).get(INFRASTRUCTURE):
            raise EnvironmentUnavailable(f"the MCP server {self._connection.name}: {text}")
        if result.is_error:
            raise ToolError(text or f"{self.name} failed and did not say why")
        return ToolResult(text)


def _text_of(result: Any) -> str:
    """The contents of a result that are text; others are named."""
    parts = []
    for content in result.content:
        if content.type == "text":
            parts.append(content.text)
        elif content.type == "resource" and getattr(content.resource, "text", None) is not None:
            parts.append(content.resource.text)
        elif content.type == "resource_link":
            parts.append(f"[link: {content.uri}]")
        else:
            kind = getattr(getattr(content, "resource", content), "mime_type", None)
            parts.append(f"[{content.type}: {kind or 'no text'}]")
    # A tool may give its result as data alone.
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


async def _list_all(client: Any) -> list[Any]:
    """All tools of a server, page by page."""
    listed: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        listed += page.tools
        if not page.next_cursor or page.next_cursor == cursor:
            return listed
        cursor = page.next_cursor


# The connection.


class _Session:
    """One connection, from its beginning to its end."""

    def __init__(self) -> None:
        self.client: Any = None
        self.stop = asyncio.Event()
        self.ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Begin to end it. What is still connecting is cancelled, once: a second time would cut its ending short."""
        self.stop.set()
        if self.task is not None and not self.ready.done() and not self.task.cancelling():
            self.task.cancel()


class _Connection:
    """Keeps a session with a server in a thread. Everything but `ask`, `listed` and `close` runs in its event loop."""

    def __init__(self, address: ServerAddress, start_timeout_s: float, reconnect_timeout_s: float) -> None:
        self.name = str(address)
        self._address, self._start_s, self._reconnect_s = address, start_timeout_s, reconnect_timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._session: _Session | None = None
        self._sessions: set[_Session] = set()  # all that have not ended
        self._lost_at: float | None = None  # by the clock of the loop; None if the server was never there, or is
        self._connecting = asyncio.Lock()
        # what a program writes to stderr, which may say why it ended
        self._errors: IO[str] | None = None
        if address.command:
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in `close`
            # The program shares the place in the file, which is read and cut here: it always writes to the end.
            fcntl.fcntl(self._errors, fcntl.F_SETFL, os.O_APPEND)

    def listed(self) -> list[Any]:
        """The tools of the server; waits without an event loop. Raises `EnvironmentUnavailable`."""
        tools: list[Any] = self._wait(self._ask(_list_all, self._start_s), 2 * self._start_s + _SLACK_S)
        return tools

    async def ask(self, question: Any, timeout_s: float) -> Any:
        """What `question(client)` gives. Raises `ToolError` for what the server refuses, answers wrongly or takes too
        long for, and `EnvironmentUnavailable` if it died or does not answer."""
        if not self._thread.is_alive():
            raise self._unavailable("its connection was closed")
        asked = asyncio.run_coroutine_threadsafe(self._ask(question, timeout_s), self._loop)
        return await asyncio.wrap_future(asked)

    def close(self) -> None:
        """End all sessions and the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(FutureTimeout, EnvironmentUnavailable):
            self._wait(self._end(), _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if self._errors is not None:
            self._errors.close()

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s)

    async def _ask(self, question: Any, timeout_s: float) -> Any:
        self._cut_errors()
        session = await self._connected()
        types, error_class = _sdk("mcp_types"), _sdk("mcp").MCPError
        # The SDK's clock, and one of ours in case that the transport itself hangs.
        try:
            async with asyncio.timeout(timeout_s + _LIVES_S):
                return await question(session.client)
        except error_class as error:
            if error.code == types.INVALID_PARAMS:
                raise ToolError(str(error)) from error
            timed_out = error.code == types.REQUEST_TIMEOUT
            if not await self._lives(session):
                self._drop(session)
                raise self._unavailable("does not answer any more" if timed_out else str(error)) from error
            if timed_out:
                raise ToolError(f"this took longer than {timeout_s:g} s and was stopped") from error
            # A program that lives has answered so itself. Over HTTP, the SDK gives the same codes to what a proxy says.
            if self._address.command:
                raise ToolError(str(error)) from error
            raise self._unavailable(str(error)) from error
        except TimeoutError as error:
            self._drop(session)
            raise self._unavailable(f"gave no answer in {timeout_s + _LIVES_S:g} s") from error
        except Exception as error:  # whatever the SDK and its transport raise
            # The SDK refuses some results, such as one against the tool's own output schema: other calls go on.
            if await self._lives(session):
                raise ToolError(str(error).partition("\n")[0]) from error
            self._drop(session)
            raise self._unavailable(f"{type(error).__name__}: {error}") from error

    async def _lives(self, session: _Session) -> bool:
        try:
            async with asyncio.timeout(_LIVES_S):
                await session.client.list_tools(cache_mode="refresh")
        except Exception:
            return False
        return True

    async def _connected(self) -> _Session:
        """The session, begun anew if there is none. Raises `EnvironmentUnavailable`."""
        async with self._connecting:
            while self._session is None:
                try:
                    self._session = await self._begun()
                except EnvironmentUnavailable:
                    # All calls share the time that a lost server has, and each tries it once when that is over.
                    if self._lost_at is None or self._loop.time() > self._lost_at + self._reconnect_s:
                        raise
                    await asyncio.sleep(_LOOK_S)
            self._lost_at = None
            return self._session

    async def _begun(self) -> _Session:
        """A new session. Raises `EnvironmentUnavailable`."""
        session = _Session()
        self._sessions.add(session)
        session.task = asyncio.ensure_future(self._hold(session))
        try:
            async with asyncio.timeout(self._start_s):
                await asyncio.shield(session.ready)
        except BaseException as error:
            session.end()
            # The call that has begun it was cancelled: the next one begins another.
            if not isinstance(error, Exception):
                raise
            why = f"no answer in {self._start_s:g} s" if isinstance(error, TimeoutError) else _innermost(error)
            raise self._unavailable(f"cannot be reached ({why})") from error
        return session

    async def _hold(self, session: _Session) -> None:
        """Open a connection and hold it until it is to end: the SDK wants both in one task."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                transport = await self._transport(stack)
                session.client = await stack.enter_async_context(_sdk("mcp").Client(transport))
                if not session.ready.done():
                    session.ready.set_result(None)
                await session.stop.wait()
        except (Exception, asyncio.CancelledError) as error:
            # Until the session is ready, `_begun` waits for it and gets the error. Later, its end is enough: the next
            # call begins another.
            if not session.ready.done():
                session.ready.set_exception(error if isinstance(error, Exception) else ConnectionError("cancelled"))
                session.ready.exception()  # it may be that nobody waits any more
        finally:
            self._forget(session)
            self._sessions.discard(session)

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        address = self._address
        if address.command:
            stdio = _sdk("mcp.client.stdio")
            command, *arguments = address.command
            parameters = stdio.StdioServerParameters(
                command=command, args=arguments, env=dict(address.env), cwd=address.cwd
            )
            return stdio.stdio_client(parameters, errlog=self._errors)
        httpx = _sdk("httpx2")
        # Reads have no limit here: nothing may come while a tool works, and `_ask` bounds a call as a whole.
        timeout = httpx.Timeout(30.0, read=None)
        # As many connections as there are calls: one that waited for another's would spend its own time.
        http = httpx.AsyncClient(
            headers=dict(address.headers),
            timeout=timeout,
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_loopback(address.url),
        )
        # The SDK does not close a client that it was given, so the session's stack does.
        await stack.enter_async_context(http)
        # Results have any length, as from a program: a picture may take megabytes.
        return _sdk("mcp.client.streamable_http").streamable_http_client(
            address.url, http_client=http, max_sse_event_size=None
        )

    def _drop(self, session: _Session) -> None:
        """End a session that has failed; the next question begins another."""
        self._forget(session)
        session.end()

    def _forget(self, session: _Session) -> None:
        if self._session is session:
            self._session, self._lost_at = None, self._loop.time()

    async def _end(self) -> None:
        """End all sessions, also those that are connecting, and wait: no program outlives its connection."""
        for session in self._sessions:
            session.end()
        if tasks := [session.task for session in self._sessions if session.task is not None]:
            await asyncio.wait(tasks, timeout=_CLOSE_S - 1)

    def _cut_errors(self) -> None:
        """Remove all but the end of a long file of errors: some servers write a line for each call."""
        if self._errors is None or (size := os.fstat(self._errors.fileno()).st_size) <= _MOST_ERRORS:
            return
        end = os.pread(self._errors.fileno(), 4 * _SHOWN_CHARS, size - 4 * _SHOWN_CHARS)
        os.ftruncate(self._errors.fileno(), 0)
        os.write(self._errors.fileno(), end)

    def _unavailable(self, reason: str) -> EnvironmentUnavailable:
        said = ""
        if self._errors is not None:
            with contextlib.suppress(ValueError):  # it is closed
                self._errors.seek(0)
                said = self._errors.read()[-_SHOWN_CHARS:].strip()
        return EnvironmentUnavailable(
            f"the MCP server {self.name} {reason}" + (f"; its last words: {said}" if said else "")
        )


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _sdk(name: str) -> Any:
    """A module of the MCP SDK. Raises `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tools of MCP servers need the package mcp 2 ({error}); .venv/bin/pip install -e '.[retrieval-mcp]'"
        ) from error
