"""The calls of one turn: checked, run at once, each failing alone, and their results as text within a budget."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import PydanticSerializationError, to_json

from verl.agent.text import cut_text, encode_outside, whole_characters
from verl.agent.tools.definition import Tool, ToolError, ToolResult
from verl.agent.tools.loading import OpenTools
from verl.errors import ConfigError, EnvironmentUnavailable, VerlError
from verl.process.by_name import in_words
from verl.process.event_loop import hear

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CallStatus = Literal["ok", "unknown_tool", "invalid_arguments", "error", "timeout", "not_run"]
_CANCELLED_S = 5.0  # how long a call that is cancelled is waited for
_STOPPED_S = 1.0  # how long one that took too long is waited for: it may have something to clear away
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class ToolCall:
    """What the policy asked for. `arguments` are an object, or the JSON text of one."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True)
class CallResult:
    """What the policy reads of a call, how the call ended, and what is stored about it (JSON)."""

    status: CallStatus
    text: str
    event: dict[str, Any]


@dataclass(frozen=True)
class CallLimits:
    """How much a policy may call, and read. None: no limit."""

    max_calls_per_turn: int | None = None
    max_calls: int | None = None
    """In a rollout; `OpenTools.num_calls` has counted those before."""
    max_result_tokens: int | None = None
    """Of one result, where its tool has no limit of its own."""
    max_turn_tokens: int | None = None
    """Of all results of a turn together. What short results leave of their equal shares is for the long ones."""


async def run_calls(
    tools: OpenTools,
    calls: Sequence[ToolCall],
    tokenizer: PreTrainedTokenizerBase,
    limits: CallLimits | None = None,
) -> list[CallResult]:
    """The results of the calls of one turn, in their order. They run at once, except for those that share a state.

    What the policy did wrong is a result that says so: a tool that does not exist, arguments against the schema, a
    `ToolError`, a call that takes longer than its tool allows, more calls than are allowed. Raises
    `EnvironmentUnavailable` when infrastructure fails, and `ConfigError` when the code of a tool does; the other calls
    are then cancelled.
    """
    limits = limits or CallLimits()
    # The first calls up to the limits are run; they count, however they end.
    left = [len(calls)]
    left += [] if limits.max_calls_per_turn is None else [limits.max_calls_per_turn]
    left += [] if limits.max_calls is None else [max(0, limits.max_calls - tools.num_calls)]
    num_run = min(left)
    tools.num_calls += num_run
    # Calls that share a state wait for the one before.
    tasks: list[asyncio.Task[CallResult]] = []
    latest: dict[int, asyncio.Task[CallResult]] = {}
    for call in calls[:num_run]:
        state = getattr(tools.get(call.name), "state", None)
        before = None if state is None else latest.get(id(state))
        tasks.append(asyncio.ensure_future(_run(tools, call, before)))
        if state is not None:
            latest[id(state)] = tasks[-1]
    try:
        results = list(await asyncio.gather(*tasks))
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=2 * _CANCELLED_S)
        for task in tasks:
            hear(task)
    results += [_not_run(call, limits, num_run) for call in calls[num_run:]]
    return _cut(tools, calls, results, tokenizer, limits)


async def _run(tools: OpenTools, call: ToolCall, before: asyncio.Task[CallResult] | None) -> CallResult:
    if before is not None:
        await asyncio.wait([before])
    # What the policy wrote.
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(tools.names) or "none"
        name = call.name if len(call.name) <= _SHOWN_CHARS else f"{call.name[:_SHOWN_CHARS]}..."
        return _result(call, "unknown_tool", f"Error: there is no tool {name!r}. The tools are: {known}.")
    try:
        arguments = _arguments(call.arguments)
    except ToolError as error:
        return _result(call, "invalid_arguments", f"Error: {error}.")
    if problems := tools.problems(call.name, arguments):
        return _result(call, "invalid_arguments", f"Error: wrong arguments for {tool.name}: {problems}.")
    # The call.
    start = time.perf_counter()
    status, answer = await _answer(tool, arguments)
    milliseconds = 1000 * (time.perf_counter() - start)
    return _result(call, status, answer.text, dict(answer.event) | {"milliseconds": milliseconds}, arguments)


async def _answer(tool: Tool, arguments: dict[str, Any]) -> tuple[CallStatus, ToolResult]:
    """How a call ended, and its result. The call is not waited for beyond its time, even if it cannot be cancelled."""
    task = asyncio.ensure_future(tool.call(arguments))
    try:
        done, _ = await asyncio.wait([task], timeout=tool.timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task], timeout=_CANCELLED_S)
        hear(task)
        raise
    if not done:
        task.cancel()
        await asyncio.wait([task], timeout=_STOPPED_S)
        task.add_done_callback(hear)
        return "timeout", ToolResult(f"Error: {tool.name} took longer than {tool.timeout_s:g} s and was stopped.")
    # An error is the policy's, that of infrastructure, or that of the tool's code.
    try:
        return "ok", _checked(tool, task.result())
    except ToolError as error:
        return "error", ToolResult(f"Error: {error}")
    except VerlError:
        raise
    except (ConnectionError, TimeoutError) as error:
        raise EnvironmentUnavailable(f"tool {tool.name}: {in_words(error)}") from error
    except (Exception, asyncio.CancelledError) as error:
        raise ConfigError(
            f"tool {tool.name} raised {in_words(error)}; correct it, or raise ToolError for what the policy did wrong "
            "and EnvironmentUnavailable for a service that fails"
        ) from error


def _checked(tool: Tool, answer: object) -> ToolResult:
    if not isinstance(answer, ToolResult):
        raise ConfigError(f"call of tool {tool.name} gave a {type(answer).__name__}; return a ToolResult")
    if not isinstance(answer.text, str) or not isinstance(answer.event, Mapping):
        what = f"a text that is a {type(answer.text).__name__} and an event that is a {type(answer.event).__name__}"
        raise ConfigError(f"call of tool {tool.name} gave {what}; make them a str and a dict")
    return answer


def _arguments(arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(arguments, Mapping):
        return dict(_whole(arguments))
    try:
        read = json.loads(arguments, parse_constant=_no_number) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are no JSON: {str(error)[:_SHOWN_CHARS]}") from error
    if not isinstance(read, dict):
        raise ToolError("the arguments are no JSON object")
    return dict(_whole(read))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _not_run(call: ToolCall, limits: CallLimits, num_run: int) -> CallResult:
    if num_run == limits.max_calls_per_turn:
        why = f"at most {limits.max_calls_per_turn} calls are allowed in one turn"
    else:
        why = f"the limit of {limits.max_calls} calls is reached"
    return _result(call, "not_run", f"Error: this call was not run: {why}.")


def _result(
    call: ToolCall,
    status: CallStatus,
    text: str,
    event: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> CallResult:
    own = {"tool": call.name, "arguments": call.arguments if arguments is None else arguments, "status": status}
    try:
        whole = _whole({**(event or {}), **own})
        stored = json.loads(to_json(whole, inf_nan_mode="strings", fallback=str, bytes_mode="base64"))
    except (PydanticSerializationError, ValueError, RecursionError) as error:
        raise ConfigError(f"tool {call.name} gave an event that cannot be stored: {error}") from error
    return CallResult(status, whole_characters(text), stored)


def _whole(value: Any) -> Any:
    """`value` with U+FFFD for each half of a surrogate pair, which JSON may carry and UTF-8 may not."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, Mapping):
        return {_whole(name): _whole(part) for name, part in value.items()}
    return [_whole(part) for part in value] if isinstance(value, list | tuple) else value


# The budget of results.


def _cut(
    tools: OpenTools,
    calls: Sequence[ToolCall],
    results: Sequence[CallResult],
    tokenizer: PreTrainedTokenizerBase,
    limits: CallLimits,
) -> list[CallResult]:
    """The results, cut where they are longer than their limits; none is left out."""
    # First each result by itself: the tool's own limit goes before that of the run.
    texts = []
    for call, result in zip(calls, results, strict=True):
        own = getattr(tools.get(call.name), "max_result_tokens", None)
        texts.append(cut_text(tokenizer, result.text, limits.max_result_tokens if own is None else own))
    # Then all results of the turn together.
    if limits.max_turn_tokens is not None:
        sizes = [len(encode_outside(tokenizer, text)) for text in texts]
        shares = _shares(sizes, limits.max_turn_tokens)
        texts = [cut_text(tokenizer, text, share) for text, share in zip(texts, shares, strict=True)]
    return [
        result if text == result.text else CallResult(result.status, text, result.event | {"cut": True})
        for text, result in zip(texts, results, strict=True)
    ]


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """A part of `total` for each size: equal parts, but what a small one does not need is for the others."""
    shares = [0] * len(sizes)
    left = total
    for num_done, number in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[number] = min(sizes[number], left // (len(sizes) - num_done))
        left -= shares[number]
    return shares
