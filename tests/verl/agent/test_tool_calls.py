"""The calls of a turn: what each of them gives back, and their limits."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.tool_calls import PROMPT, TOKENIZER, add, one, run, slow, tools_of
from verl.agent.text import encode_outside
from verl.agent.tools import (
    CallLimits,
    CallResult,
    ToolCall,
    ToolError,
    ToolResult,
    ToolSet,
    run_calls,
    tool_from_function,
)
from verl.errors import ConfigError, EnvironmentUnavailable


def refuse(why: str) -> str:
    """Refuse."""
    raise ToolError(why)


def test_calls_run_at_once_and_each_fails_alone() -> None:
    """The last two wait for each other: they would never end one after the other."""
    meeting = threading.Barrier(2)

    def meet(number: int) -> int:
        """Meet the other one."""
        meeting.wait(60)
        return number

    results = run(
        tools_of(add, slow, refuse, meet),
        ("slow", {"seconds": 0.2, "text": "late"}),
        ("add", {"first": 1, "second": 2}),
        ("subtract", {}),
        ("add", {"first": "one"}),
        ("add", '{"first": 1'),
        ("add", "[1]"),
        ("add", '{"first": NaN}'),
        ("add", {"first": 1, "third": 3}),
        ("refuse", {"why": "not today"}),
        ("meet", {"number": 1}),
        ("meet", {"number": 2}),
    )
    assert [(result.status, result.text) for result in results] == [
        ("ok", "late"),
        ("ok", "3"),
        ("unknown_tool", "Error: there is no tool 'subtract'. The tools are: add, slow, refuse, meet."),
        ("invalid_arguments", "Error: wrong arguments for add: first: 'one' is not of type 'integer'."),
        ("invalid_arguments", "Error: the arguments are no JSON: Expecting ',' delimiter: line 1 column 12 (char 11)."),
        ("invalid_arguments", "Error: the arguments are no JSON object."),
        ("invalid_arguments", "Error: the arguments are no JSON: NaN is no JSON number."),
        (
            "invalid_arguments",
            "Error: wrong arguments for add: Additional properties are not allowed ('third' was unexpected).",
        ),
        ("error", "Error: not today"),
        ("ok", "1"),
        ("ok", "2"),
    ]
    assert results[1].event.pop("milliseconds") >= 0
    assert results[1].event == {"tool": "add", "arguments": {"first": 1, "second": 2}, "status": "ok"}


def test_half_characters_and_deep_nesting_of_the_policy_harm_nobody() -> None:
    def say(text: str) -> str:
        """Say it."""
        return text

    deep = "[" * 100_000
    results = run(
        tools_of(say), ("say", '{"text": "\\ud83d!"}'), ("say", {"text": "\ud83d"}), ("say", deep), ("\udc00", {})
    )
    assert [result.text for result in results[:2]] == ["\ufffd!", "\ufffd"]
    assert [result.status for result in results] == ["ok", "ok", "invalid_arguments", "unknown_tool"]
    assert results[0].event["arguments"] == {"text": "\ufffd!"}


def test_a_call_that_never_ends_is_stopped() -> None:
    ended: list[str] = []
    release = threading.Event()

    async def patient() -> str:
        """Wait, and clear away at the end."""
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("cleared")
        return ""

    def stubborn() -> str:
        """Ignore everything."""
        release.wait(600)
        return ""

    async def deaf() -> str:
        """Ignore that it is cancelled, the first time."""
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)
        return ""

    start = time.monotonic()
    results = run(
        tools_of(patient, stubborn, add, timeout_s=0.1), ("patient", {}), ("stubborn", {}), ("add", {"first": 4})
    )
    assert [result.status for result in results] == ["timeout", "timeout", "ok"]
    assert results[0].text == "Error: patient took longer than 0.1 s and was stopped."
    assert ended == ["cleared"]
    assert time.monotonic() - start < 60
    release.set()
    assert one(deaf, timeout_s=0.1).status == "timeout"


def test_a_function_that_gives_a_coroutine_is_awaited() -> None:
    class Later:
        """Answers later."""

        async def __call__(self, text: str) -> str:
            return text

    tools = ToolSet([tool_from_function(Later(), name="later")])
    assert run(tools, ("later", {"text": "now"}))[0].text == "now"


@dataclass
class Place:
    """A point."""

    x: int
    y: float = 0.5


def returns(value: Any) -> Callable[[], Any]:
    def give() -> Any:
        """Give it."""
        return value

    return give


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        (None, "(no output)"),
        (float("nan"), "NaN"),
        (0.1, "0.1"),
        (True, "true"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (Place(1), '{"x":1,"y":0.5}'),
        ("half \ud83d", "half \ufffd"),
        (ToolResult("own", {"score": float("inf"), "raw": b"\xff"}), "own"),
    ],
)
def test_what_a_function_returns_is_text(value: Any, text: str) -> None:
    result = one(returns(value))
    assert (result.status, result.text) == ("ok", text)
    if isinstance(value, ToolResult):
        assert result.event["score"] == "Infinity" and isinstance(result.event["raw"], str)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\xff", "returned a bytes; decode it to text"),
        (object(), "returned a object; return text, or what JSON can hold"),
        ((x for x in "ab"), "returned a generator; return text"),
        ([object()], "returned what JSON cannot hold"),
        (ToolResult(text=3), "gave a text that is a int"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_text_is_an_error_of_the_tool(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(returns(value))


def test_ten_megabytes_are_cut_and_short_results_leave_their_room_to_long_ones() -> None:
    def long(words: int) -> str:
        """Write much."""
        return "word " * words

    (cut,) = run(tools_of(long), ("long", {"words": 2_000_000}), max_result_tokens=64)
    assert len(encode_outside(TOKENIZER, cut.text)) <= 64
    assert cut.text.startswith("word word") and cut.text.endswith("\n[cut: 10000000 characters in all]")
    assert cut.event["cut"] is True

    results = run(
        tools_of(long, add),
        ("add", {"first": 7}),
        ("long", {"words": 500}),
        ("long", {"words": 500}),
        max_turn_tokens=201,
    )
    sizes = [len(encode_outside(TOKENIZER, result.text)) for result in results]
    assert results[0].text == "7" and sizes[0] == 1
    assert min(sizes[1:]) > 80 and sum(sizes) <= 201

    (own,) = run(tools_of(long, max_result_tokens=10), ("long", {"words": 500}), max_result_tokens=1000)
    assert 0 < len(encode_outside(TOKENIZER, own.text)) <= 10


def test_calls_beyond_the_limits_are_answered_but_not_run() -> None:
    seen: list[int] = []

    def note(number: int) -> None:
        """Note it."""
        seen.append(number)

    async def turns() -> list[list[CallResult]]:
        opened = await tools_of(note).open(PROMPT)
        limits = CallLimits(max_calls_per_turn=2, max_calls=3)
        return [
            await run_calls(opened, [ToolCall("note", {"number": number}) for number in turn], TOKENIZER, limits)
            for turn in ([1, 2, 3], [4, 5], [6])
        ]

    first, second, third = asyncio.run(turns())
    assert [result.status for result in first + second + third] == ["ok", "ok", "not_run", "ok", "not_run", "not_run"]
    assert first[2].text == "Error: this call was not run: at most 2 calls are allowed in one turn."
    assert second[1].text == third[0].text == "Error: this call was not run: the limit of 3 calls is reached."
    assert sorted(seen) == [1, 2, 4]


def down() -> str:
    """Ask a service that is down."""
    raise EnvironmentUnavailable("the service is down; start it")


def refused() -> str:
    """Ask a port where nobody listens."""
    raise ConnectionRefusedError("port 1")


def broken() -> str:
    """Have a bug."""
    return {}["x"]  # type: ignore[index]


def quits() -> str:
    """End the process."""
    sys.exit(3)


async def quits_too() -> str:
    """End the process."""
    sys.exit(3)


def stops() -> str:
    """End an iteration that is none."""
    return next(iter(()))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (quits, ConfigError, r"tool quits raised RuntimeError: SystemExit\(3\)"),
        (quits_too, ConfigError, r"tool quits_too raised RuntimeError: SystemExit\(3\)"),
        (stops, ConfigError, r"tool stops raised RuntimeError: StopIteration\(\)"),
        (down, EnvironmentUnavailable, "the service is down"),
        (refused, EnvironmentUnavailable, "tool refused: ConnectionRefusedError: port 1"),
        (
            broken,
            ConfigError,
            r"tool broken raised KeyError: 'x' \(test_tool_calls.py:\d+\); correct it, or raise ToolError",
        ),
    ],
)
def test_failing_infrastructure_and_code_are_not_the_policys_doing(
    function: Callable[..., Any], kind: type[Exception], message: str
) -> None:
    cancelled: list[bool] = []

    async def other() -> str:
        """Wait until cancelled."""
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    with pytest.raises(kind, match=message):
        run(tools_of(function, other), ("other", {}), (function.__name__, {}))
    assert cancelled == [True]
