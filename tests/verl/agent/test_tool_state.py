"""The state that the tools of one episode share."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.helpers.tool_calls import PROMPT, TOKENIZER, run
from verl.agent.tools import StatefulTools, ToolCall, load_tools, run_calls, tool
from verl.errors import ConfigError
from verl.protocol import Prompt


class Notes(StatefulTools):
    """A notebook."""

    closed = 0

    def __init__(self, prompt: Prompt, start: str = "") -> None:
        super().__init__(prompt)
        self.text = start

    @tool
    def write(self, text: str) -> None:
        """Write a note.

        Args:
            text: the note
        """
        before = self.text
        time.sleep(0.02)
        self.text = before + text

    @tool
    async def read(self) -> str:
        """Read the notes."""
        return self.text

    @tool
    def wait(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def close(self) -> None:
        type(self).closed += 1


def test_each_episode_has_its_own_state_whose_calls_run_in_order() -> None:
    tools = load_tools([{"name": f"{__name__}.Notes", "options": {"start": "-", "timeout_s": 50}}])
    assert tools.has_state and [made.name for made in tools.tools] == ["write", "read", "wait"]
    assert tools.tools[0].parameters["properties"] == {"text": {"type": "string", "description": "the note"}}
    assert tools.tools[0].timeout_s == 50

    async def episodes() -> list[list[str]]:
        opened = [await tools.open(PROMPT), await tools.open(PROMPT)]
        calls = [
            [*(ToolCall("write", {"text": letter}) for letter in word), ToolCall("read", {})] for word in ("abcd", "x")
        ]
        results = await asyncio.gather(
            *(run_calls(episode, turn, TOKENIZER) for episode, turn in zip(opened, calls, strict=True))
        )
        for episode in opened:
            await episode.close()
            await episode.close()
        return [[result.text for result in turn] for turn in results]

    results = run(tools, ("write", {"text": "a"}), ("write", {}), ("read", {}))
    assert [result.text for result in results[::2]] == ["(no output)", "-a"]  # a wrong call does not break the order

    before = Notes.closed
    first, second = asyncio.run(episodes())
    assert first[-1] == "-abcd" and second[-1] == "-x"
    assert Notes.closed == before + 2


class Broken(StatefulTools):
    """Cannot be made."""

    def __init__(self, prompt: Prompt) -> None:
        raise KeyError("question")

    @tool
    def nothing(self) -> None:
        """Do nothing."""


def test_a_state_that_cannot_be_made_is_an_error_and_the_others_are_closed() -> None:
    tools, before = load_tools([f"{__name__}.Notes", f"{__name__}.Broken"]), Notes.closed
    with pytest.raises(
        ConfigError, match=r"agent.tools: .*Broken cannot be made: KeyError: 'question' \(test_tool_state"
    ):
        asyncio.run(tools.open(PROMPT))
    assert Notes.closed == before + 1


def test_a_state_that_is_busy_says_so() -> None:
    tools = load_tools([{"name": f"{__name__}.Notes", "options": {"timeout_s": 0.2}}])
    results = run(tools, ("wait", {"seconds": 20}), ("write", {"text": "a"}), ("read", {}))
    assert [result.status for result in results] == ["timeout", "error", "ok"]
    assert "an earlier call is still running" in results[1].text
