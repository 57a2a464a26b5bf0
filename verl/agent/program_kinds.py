"""How `agent.program` is run: a coroutine function, a command for each episode, or a command that serves them all."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

from verl.errors import ConfigError
from verl.process.by_name import dotted_name, load_by_name

log = logging.getLogger(__name__)

MODEL = "policy"
"""The name of the model for programs; the endpoint takes any other one too."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_LAST_LINES, _LONGEST_LINE = 20, 400
BLOCKED_S = 10.0
"""How long a function may block the event loop before that is logged."""
_CLOSE_S = 1.0
"""How long the output of a command that has ended may stay open before the rest of it is given up."""


@dataclass(frozen=True)
class ProgramTask:
    """What a program gets for one episode.

    `base_url` and `api_key` are those of the episode's session, as clients of OpenAI's interface take them. `messages`
    and `row` are those of the prompt file; `retriever_url` is `retriever.url`.
    """

    base_url: str
    api_key: str
    messages: Sequence[Mapping[str, Any]]
    row: dict[str, Any]
    retriever_url: str
    model: str = MODEL


class ProgramFailed(Exception):
    """The program ended with an error, which this says in words."""


class Program(ABC):
    """Plays episodes, several at once."""

    @abstractmethod
    async def play(self, task: ProgramTask) -> Any:
        """Play one; returns what the program returns. Raises `ProgramFailed`, or what the program raises."""

    async def close(self) -> None:  # noqa: B027  most hold nothing
        """End what runs beyond an episode."""


def program_of(name: str, serves: bool = False) -> Program:
    """The program `agent.program`, with `agent.program_serves`. Raises `ConfigError`."""
    # What is no dotted name is a command for bash.
    if not _DOTTED.fullmatch(name):
        return ServingCommand(name) if serves else Command(name)
    if serves:
        raise ConfigError(
            f"agent.program_serves=true is for a command, and agent.program={name} is a function; leave it out"
        )
    for client in ("httpx", "httpx2"):  # else they log each call of a program in this process
        logging.getLogger(client).setLevel(logging.WARNING)
    function = load_by_name(name, "agent.program (a command has a space in it, such as `python agent.py`)")
    if not inspect.iscoroutinefunction(_what_runs(function)):
        own = name.rpartition(".")[2]
        raise ConfigError(f"agent.program={name} is no coroutine function: write `async def {own}(task)`")
    return Function(function)


def _what_runs(function: Any) -> Any:
    """The function that a call runs: that of a partial, or the `__call__` of an object."""
    while isinstance(function, functools.partial):
        function = function.func
    return type(function).__call__ if callable(function) and not inspect.isroutine(function) else function


class Function(Program):
    """A coroutine function, or an object that is called as one, in this process."""

    def __init__(self, function: Callable[[ProgramTask], Awaitable[Any]]) -> None:
        self._function = function
        self._alarm: _BlockAlarm | None = None

    async def play(self, task: ProgramTask) -> Any:
        if self._alarm is None:
            self._alarm = _BlockAlarm(self._function)
        return await self._function(task)

    async def close(self) -> None:
        if self._alarm is not None:
            self._alarm.stop()
            self._alarm = None  # the next episode may be played by another event loop


class _BlockAlarm:
    """Logs an error when a function blocks the event loop, where the endpoint and the sampler are, too.

    A client that does not await, say, waits for ever then: its call cannot be answered.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        runs = inspect.unwrap(_what_runs(function))
        code = getattr(runs, "__code__", None)  # none where somebody's wrapper says that it wraps an object
        self._name, self._file = dotted_name(runs), code.co_filename if code else ""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="block alarm", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(BLOCKED_S / 10):
            # The event loop sets the beat as soon as it runs again.
            beat = threading.Event()
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:  # the loop is closed
                return
            if not beat.wait(BLOCKED_S) and (line := self._running_line()):
                log.error(
                    "agent.program=%s has blocked for %g s in %s, line %d; nothing goes on in this process, not even "
                    "what it waits for. Await instead (AsyncOpenAI, ainvoke, httpx.AsyncClient), or call it by "
                    "asyncio.to_thread",
                    *(self._name, BLOCKED_S, self._file, line),
                )
                # The same block is not reported again.
                beat.wait()

    def _running_line(self) -> int:
        """The line of the function's file that the event loop is in; 0: it is in none."""
        frame = sys._current_frames().get(self._loop_thread)
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0


@dataclass(frozen=True)
class Command(Program):
    """A command that bash runs for each episode, in a group of processes that ends with it.

    It reads the task as JSON from its input; address and key are also in OPENAI_BASE_URL and OPENAI_API_KEY. The last
    line that it prints is what it returns, if that is JSON.
    """

    command: str

    async def play(self, task: ProgramTask) -> Any:
        child = await _Child.start(self.command, OPENAI_BASE_URL=task.base_url, OPENAI_API_KEY=task.api_key)
        try:
            child.send(_as_json(task), last=True)
            status = await child.wait()
        finally:
            # Also when the rollout is cancelled: no command outlives its episode.
            await child.end()
        if status:
            raise ProgramFailed(child.last_words())
        try:
            return json.loads(child.printed.last[-1]) if child.printed.last else None
        except ValueError:
            return None


class ServingCommand(Program):
    """A command that bash starts once, for all episodes: for programs that take long to start.

    It reads a line for each, `{"id": ..., "task": {...}}`, and prints `{"id": ..., "result": ...}` or `{"id": ...,
    "error": "..."}`, in any order; other lines are its log. If it ends, the episodes that it has fail, and the next one
    starts it again.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._starting = asyncio.Lock()
        self._child: _Child | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def play(self, task: ProgramTask) -> Any:
        async with self._starting:
            if self._child is None:
                self._child = await _Child.start(self.command, self._hear)
                self._waiting = asyncio.ensure_future(self._until_it_ends(self._child))
        child, name = self._child, str(next(self._numbers))
        answer = self._asked[name] = asyncio.get_running_loop().create_future()
        try:
            child.send(b'{"id": "%s", "task": %s}\n' % (name.encode(), _as_json(task)))
            return await answer
        finally:
            del self._asked[name]

    async def close(self) -> None:
        if self._child is not None and self._waiting is not None:
            await self._child.end()
            await self._waiting

    async def _until_it_ends(self, child: _Child) -> None:
        await child.wait()
        self._child = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ProgramFailed(child.last_words()))

    def _hear(self, line: str) -> None:
        """Give a result to whom waits for it."""
        try:
            said = json.loads(line)
            answer = self._asked.get(str(said["id"]))
        except (ValueError, TypeError, KeyError):  # a line of its log
            return
        if answer is None or answer.done():  # of an episode that nobody waits for any more
            return
        if "error" in said:
            answer.set_exception(
                ProgramFailed(f"the program {self.command!r} failed: {str(said['error'])[:_LONGEST_LINE]}")
            )
        else:
            answer.set_result(said.get("result"))


def _as_json(task: ProgramTask) -> bytes:
    return json.dumps(asdict(task), default=str).encode()


class _Child(asyncio.SubprocessProtocol):
    """A command that bash runs, in a group of processes that is killed when it ends.

    Its end is its exit, and not that of its output, which a process that it leaves behind may hold open;
    `asyncio.subprocess.Process.wait` waits for both.
    """

    def __init__(self, command: str, hear: Callable[[str], None]) -> None:
        self.command = command
        self.printed, self.errors = _Lines(hear), _Lines()
        self._outputs = {1: self.printed, 2: self.errors}
        self._exited, self._read = asyncio.Event(), asyncio.Event()
        self._transport: asyncio.SubprocessTransport

    @classmethod
    async def start(cls, command: str, hear: Callable[[str], None] = lambda line: None, **variables: str) -> Self:
        """Run the command with further environment variables; `hear` gets each line that it prints."""
        child = cls(command, hear)
        await asyncio.get_running_loop().subprocess_exec(
            lambda: child, "bash", "-c", command, env=os.environ | variables, start_new_session=True
        )
        return child

    def send(self, text: bytes, last: bool = False) -> None:
        """Write to its input, which it need not read; `last`: and close it."""
        pipe = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        if pipe.is_closing():  # it has closed its input, or has ended
            return
        pipe.write(text)
        if last:
            pipe.close()

    async def wait(self) -> int:
        """Its status, once it has ended and what it printed is read."""
        await self._exited.wait()
        # A process that has left the group survives, and may hold the output open.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read.wait(), _CLOSE_S)
        self._transport.close()
        status = self._transport.get_returncode()
        assert status is not None
        return status

    async def end(self) -> None:
        """Kill it, if it runs, and its group."""
        if not self._exited.is_set():
            self._kill_group()
        await self.wait()

    def last_words(self) -> str:
        """How it ended, and the last lines of its errors."""
        status = self._transport.get_returncode()
        assert status is not None
        words = " | ".join(line[:_LONGEST_LINE] for line in [*self.errors.last][-3:]) or "it printed no error"
        ending = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"the program {self.command!r} ended {ending}: {words}"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)

    # What the event loop calls. Ray's is of uvloop, whose transports derive from none of asyncio's.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._outputs[fd].feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd in self._outputs:
            self._outputs.pop(fd).feed(b"\n")
        if not self._outputs:
            self._read.set()

    def process_exited(self) -> None:
        self._kill_group()
        self._exited.set()


class _Lines:
    """The last lines of an output that are not empty; `hear` gets each, whatever its length."""

    def __init__(self, hear: Callable[[str], None] = lambda line: None) -> None:
        self.last = deque[str](maxlen=_LAST_LINES)
        self._hear = hear
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> None:
        *whole, rest = piece.split(b"\n")
        for line in whole:
            text = b"".join([*self._begun, line]).decode(errors="replace").strip()
            self._begun = []
            if text:
                self.last.append(text)
                self._hear(text)
        if rest:
            self._begun.append(rest)
