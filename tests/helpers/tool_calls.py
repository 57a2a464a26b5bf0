"""Tools of tests, and the turns that call them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from chat_tokenizer import chat_tokenizer

from verl.agent.tools import CallLimits, CallResult, ToolCall, ToolSet, run_calls, tool_from_function
from verl.protocol import Prompt

TOKENIZER = chat_tokenizer()
PROMPT = Prompt((1,), "test", {"question": "?"})


def run(tools: ToolSet, *calls: tuple[str, Any], **limits: Any) -> list[CallResult]:
    """The results of one turn of an episode of its own."""

    async def turn() -> list[CallResult]:
        opened = await tools.open(PROMPT)
        try:
            return await run_calls(opened, [ToolCall(*call) for call in calls], TOKENIZER, CallLimits(**limits))
        finally:
            await opened.close()

    return asyncio.run(turn())


def one(function: Callable[..., Any], arguments: Any = None, **options: Any) -> CallResult:
    """The result of a single call of the function."""
    (result,) = run(ToolSet([tool_from_function(function, **options)]), (function.__name__, arguments or {}))
    return result


def add(first: int, second: int = 0) -> int:
    """Add two numbers."""
    return first + second


async def slow(seconds: float, text: str) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return text


def tools_of(*functions: Callable[..., Any], **options: Any) -> ToolSet:
    return ToolSet([tool_from_function(function, **options) for function in functions])
