"""The endpoint that a program calls: what it refuses, and who may call it, and where."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.helpers.chat_episodes import says
from tests.helpers.programs import ASKED, Stage, answering, ask, client_of, refused
from verl.agent.program_kinds import ProgramTask
from verl.errors import ConfigError
from verl.protocol import Status, Trajectory

CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "[1]"}}

# Too deep for the writer of the template, but not for the reader of JSON: by its frames a level.
DEEP = 480 if sys.version_info < (3, 12) else 980


def nested(depth: int) -> dict[str, Any]:
    """A call whose arguments are lists within lists."""
    return CALL | {"function": {"name": "search", "arguments": f'{{"query": {"[" * depth}{"]" * depth}}}'}}


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "robot|Input should be"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "a text or a list of text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "a text or a list of text parts",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *ASKED]},
            "messages.1.tool_calls.0.function.arguments",
            "a JSON object",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "function_call": CALL["function"]}, *ASKED]},
            "messages.1.function_call",
            "would not be read",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": None, "refusal": "No."}, *ASKED]},
            "messages.1.refusal",
            "would not be read",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [nested(DEEP)]}, *ASKED]}, "messages", "too deeply"),
        (
            {"messages": [*ASKED, {"role": "assistant", "tool_calls": [nested(5000)]}, *ASKED]},
            "messages",
            "a JSON object|too deeply",
        ),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, "messages", "ends with a user message"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "a tool is"),
        ({"n": 2}, "n", "1"),
        ({"tool_choice": "required"}, "tool_choice", "auto"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"stop": 3}, "stop", "string"),
        ({"max_tokens": 0}, "max_tokens", "greater"),
    ],
)
def test_a_call_that_cannot_be_answered_is_told_where_it_is_wrong(call: dict[str, Any], field: str, words: str) -> None:
    async def agent(task: ProgramTask) -> None:
        error = await refused(task, **call)
        assert error.status_code == 400 and str(error.param).startswith(field), error
        assert error.response.headers["x-should-retry"] == "false"
        assert any(word in error.message for word in words.split("|")), error.message
        await ask(task, ASKED)

    assert Stage("trimming", agent).play(says("Sael")).status is Status.ANSWERED


def test_a_prompt_of_text_or_of_tokens_that_are_none_is_refused() -> None:
    async def agent(task: ProgramTask) -> None:
        async with client_of(task) as client:
            for prompt, words in (("text", "token ids"), ([10**6], "has no token 1000000"), ([-1], "has no token -1")):
                with pytest.raises(openai.BadRequestError, match=words):
                    await client.completions.create(model="m", prompt=prompt)
        await ask(task, ASKED)

    assert Stage("trimming", agent).play(says("Sael")).status is Status.ANSWERED


@pytest.mark.parametrize(
    ("deadline", "broken", "status", "kind"),
    [("0", False, 504, "timeout"), ("no", False, 422, "invalid_request_error"), (None, True, 500, "server_error")],
)
def test_whatever_fails_is_told_as_openai_tells_it(
    deadline: str | None, broken: bool, status: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: Any) -> Any:
        raise KeyError("broken")

    async def agent(task: ProgramTask) -> None:
        with monkeypatch.context() as patched:
            if broken:
                patched.setattr("search_r1.serve.policy_endpoint.ChatRequest.call", break_down)
            error = await refused(task, extra_headers={"X-Deadline-Ms": deadline} if deadline else {})
        assert error.status_code == status and error.body["type"] == kind  # type: ignore[index, call-overload]
        assert error.response.headers["x-should-retry"] == "false"
        await ask(task, ASKED)

    assert Stage("trimming", agent).play(says("Sael")).status is Status.ANSWERED


def test_a_session_opens_for_its_own_key_at_its_own_address_and_as_long_as_it_lives() -> None:
    tasks: list[ProgramTask] = []

    async def agent(task: ProgramTask) -> None:
        tasks.append(task)
        if len(tasks) == 1:
            await asyncio.wait_for(both.wait(), 20)
        else:
            for other in (replace(task, api_key=tasks[0].api_key), replace(task, api_key="x")):
                error = await refused(other)
                assert (error.status_code, error.code) == (401, "invalid_api_key")
            error = await refused(replace(task, base_url=tasks[0].base_url))
            assert error.status_code == 401
            both.set()
        await ask(task, ASKED)

    async def scene() -> tuple[list[Trajectory], openai.APIStatusError]:
        nonlocal both
        both = asyncio.Event()
        played = [asyncio.create_task(stage.episode(stage.script([says(text)]))) for text in ("one", "two")]
        done = [await one for one in played]
        late = await refused(tasks[0])
        await stage.environment.close()
        return done, late

    both = asyncio.Event()
    stage = Stage("trimming", agent)
    (one, two), late = asyncio.run(scene())
    assert [event["text"] for played in (one, two) for event in played.events] == ["one", "two"]
    assert (late.status_code, late.code) == (410, "session_over")
    assert tasks[0].base_url.startswith("http://127.0.0.1:")


def test_a_proxy_of_the_machine_is_not_asked_for_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)

    async def agent(task: ProgramTask) -> None:
        await ask(task, ASKED)

    assert Stage("trimming", agent).play(says("Sael")).status is Status.ANSWERED
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"


def test_an_address_that_is_not_this_machines_is_told() -> None:
    stage = Stage("trimming", answering({}, []), host="203.0.113.1")
    with pytest.raises(ConfigError, match=r"agent.program_host=203.0.113.1: cannot listen on"):
        stage.play()


def test_at_all_addresses_a_program_gets_one_that_others_can_reach() -> None:
    async def agent(task: ProgramTask) -> str:
        await ask(task, ASKED)
        return task.base_url

    url = Stage("trimming", agent, host="0.0.0.0").play(says("Sael")).events[-1]["answer"]
    assert "//0.0.0.0" not in url
