"""How a program is run: a command for each episode, one that serves them all, and names that are neither."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.helpers.chat_episodes import says
from tests.helpers.programs import ASKED, Play, Stage, ask
from verl.agent import program_kinds
from verl.agent.program_kinds import Command, Function, Program, ProgramTask, ServingCommand, program_of
from verl.errors import ConfigError
from verl.protocol import Status, Trajectory

PYTHON = shlex.quote(sys.executable)


@pytest.fixture(autouse=True, params=[None, uvloop.EventLoopPolicy()], ids=["asyncio", "uvloop"])
def event_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of both kinds: Ray's are of uvloop."""
    asyncio.set_event_loop_policy(request.param)
    yield
    asyncio.set_event_loop_policy(None)


async def run(command: str, task: ProgramTask) -> Any:
    return await Command(command).play(task)


def task_for(url: str = "http://127.0.0.1:1/v1") -> ProgramTask:
    return ProgramTask(url, "key", ASKED, {"question": "é?"}, "http://127.0.0.1:8000/retrieve")


def test_a_command_gets_its_task_and_its_last_line_is_the_result(tmp_path: Path) -> None:
    program = tmp_path / "a gent.py"
    program.write_text(
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "assert os.environ['OPENAI_API_KEY'] == task['api_key'] == 'key', task\n"
        "print('a log line')\n"
        "print(json.dumps({'answer': task['row']['question'], 'url': os.environ['OPENAI_BASE_URL']}))\n"
    )
    given = asyncio.run(run(f"{PYTHON} '{program}'", task_for()))
    assert given == {"answer": "é?", "url": "http://127.0.0.1:1/v1"}
    assert asyncio.run(run("true # reads nothing", task_for())) is None
    assert asyncio.run(run("echo no JSON", task_for())) is None


def test_a_command_that_fails_or_is_killed_says_its_last_words() -> None:
    with pytest.raises(Exception, match="ended with status 3: one | two"):
        asyncio.run(run("echo one >&2; echo two >&2; exit 3", task_for()))
    with pytest.raises(Exception, match="ended by signal 9: it printed no error"):
        asyncio.run(run("kill -9 $$", task_for()))


def test_a_command_that_is_not_waited_for_any_more_ends_with_its_children(tmp_path: Path) -> None:
    async def scene() -> None:
        running = asyncio.create_task(run(f"(sleep 60; touch {tmp_path}/late) & echo $! >&2; wait", task_for()))
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.cancelled()

    asyncio.run(scene())
    found = Path("/proc").glob("[0-9]*/cmdline")
    assert not [one for one in found if f"touch {tmp_path}".encode() in read_bytes(one)]


async def asks(task: ProgramTask) -> None:
    await ask(task, ASKED)


class Agent:
    async def __call__(self, task: ProgramTask) -> None:
        await asks(task)


agent, part = Agent(), partial(asks)


@pytest.mark.parametrize("name", ["agent", "part"])
def test_an_object_that_is_called_as_a_coroutine_function_is_one(name: str) -> None:
    assert Stage("trimming", program_of(f"{__name__}.{name}")).play(says("Sael")).status is Status.ANSWERED


def test_calls_of_a_program_are_not_logged_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    played = Stage("trimming", program_of(f"{__name__}.asks")).play(says("Sael"))
    assert played.status is Status.ANSWERED and "HTTP Request" not in caplog.text


def test_a_function_that_blocks_is_told_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own turn cannot be sampled then, so it may wait for ever."""
    monkeypatch.setattr(program_kinds, "BLOCKED_S", 0.3)

    async def waits(task: ProgramTask) -> str:
        await asyncio.sleep(1.5)
        return "waited"

    async def blocks(task: ProgramTask) -> str:
        time.sleep(1.5)
        return "blocked"

    async def scene(function: Play) -> Any:
        program = Function(function)
        try:
            return await program.play(task_for())
        finally:
            await program.close()

    class Agent:
        async def __call__(self, task: ProgramTask) -> str:
            return await blocks(task)

    assert asyncio.run(scene(waits)) == "waited" and not caplog.records
    line = blocks.__code__.co_firstlineno + 1
    for one, name in ((blocks, "blocks"), (Agent(), "Agent.__call__"), (partial(blocks), "blocks")):
        assert asyncio.run(scene(one)) == "blocked"
        (record,) = caplog.records
        assert f"{name} has blocked for 0.3 s in {__file__}, line {line};" in record.getMessage()
        caplog.clear()


@pytest.mark.parametrize("detached", ["", "setsid "])
@pytest.mark.parametrize("kind", [Command, ServingCommand])
def test_a_command_has_ended_when_it_exits_though_what_it_left_behind_holds_its_output(
    tmp_path: Path, kind: type[Command] | type[ServingCommand], detached: str
) -> None:
    left = tmp_path / "left"
    started = f"{detached}bash -c 'echo $$ > {left}; exec sleep 600' & while [ ! -s {left} ]; do sleep 0.1; done"

    async def scene(program: Program) -> Any:
        try:
            return await asyncio.wait_for(program.play(task_for()), 60)
        finally:
            await program.close()

    if kind is Command:
        assert asyncio.run(scene(kind(f'{started}; echo \'{{"answer": "in time"}}\''))) == {"answer": "in time"}
    else:
        with pytest.raises(Exception, match="ended with status 3: the last words"):
            asyncio.run(scene(kind(f"{started}; read task; echo the last words >&2; exit 3")))
    alive = Path(f"/proc/{left.read_text().strip()}/cmdline")
    assert (b"sleep" in read_bytes(alive)) == bool(detached), "it ends with its group, and leaves it with a session"
    if detached:
        os.kill(int(left.read_text()), signal.SIGKILL)


def test_a_line_of_any_length_is_one_line() -> None:
    text = "x" * 3_000_000
    written = f"import json; print('log'); print(json.dumps('{text[:3]}' * 1_000_000))"
    assert asyncio.run(run(f'{PYTHON} -c "{written}"', task_for())) == text


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


SERVES = """
import json, sys, urllib.request
print("a line of its log", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    task = asked["task"]
    if "messages" not in task["row"]:
        body = json.dumps({"messages": task["messages"]}).encode()
        headers = {"Authorization": "Bearer " + task["api_key"], "Content-Type": "application/json"}
        request = urllib.request.Request(task["base_url"] + "/chat/completions", body, headers)
        said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if said == "crash":
        sys.exit("the last words")
    reply = {"error": "it was late"} if said == "fail" else {"result": {"answer": said}}
    print(json.dumps({"id": asked["id"]} | reply), flush=True)
"""


def test_a_command_that_serves_plays_all_episodes_and_is_started_again_if_it_ends(tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(SERVES)
    program = ServingCommand(f"echo started >> {tmp_path}/starts; exec {PYTHON} {tmp_path}/serves.py")

    async def scene() -> list[Trajectory]:
        stage = Stage("trimming", program)
        try:
            return [
                await stage.episode(stage.script([says(text)])) for text in ("one", "two", "fail", "crash", "three")
            ]
        finally:
            await stage.environment.close()

    one, two, failed, crashed, three = asyncio.run(scene())
    assert [played.events[-1]["program"] for played in (one, two, three)] == [
        {"answer": "one"}, {"answer": "two"}, {"answer": "three"},
    ]  # fmt: skip
    assert failed.status is crashed.status is Status.FAILED
    assert str(failed.failure).endswith("failed: it was late")
    assert "ended with status 1: the last words" in str(crashed.failure)
    assert (tmp_path / "starts").read_text().split() == ["started", "started"]
    assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if b"serves.py" in read_bytes(one)]


def test_a_program_that_cannot_be_run_is_told_before_the_run() -> None:
    with pytest.raises(ConfigError, match="a command has a space in it"):
        program_of("no_such.module")
    with pytest.raises(ConfigError, match="is a function; leave it out"):
        program_of("search_r1.serve.wire.parse_chat", serves=True)
    with pytest.raises(ConfigError, match="no coroutine function: write `async def parse_chat"):
        program_of("search_r1.serve.wire.parse_chat")
    with pytest.raises(ConfigError, match="no coroutine function: write `async def Agent"):
        program_of(f"{__name__}.Agent")  # the class, not an object of it
    with pytest.raises(ConfigError, match="no coroutine function: write `async def ASKED"):
        program_of(f"{__name__}.ASKED")
