"""Following an episode changes nothing about it, and ends with its deadline. The policy's lines are scripted here."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_agent_scripted import agent_of

from search_r1.llm_agent.agent import SearchAgent
from search_r1.serve.app import create_app
from search_r1.serve.chat import ServeOptions
from search_r1.serve.parts import Part
from search_r1.serve.streaming import Finished, stream_episode
from verl.agent.text import decode_turn
from verl.protocol import Source

THINK = "<think> \u6cb3 </think>"
RIVER, CITY = f"{THINK}<search> river </search>", "<search> city </search>"


async def follow(agent: SearchAgent, timeout_s: float = 30.0) -> list[Part | Finished]:
    return [part async for part in stream_episode(agent, agent.prompt("Where?"), None, timeout_s)]


lines = st.sampled_from(
    [RIVER, CITY, f"{THINK}<answer> Sael </answer>", "no action", "<search> \u6cb3", "<answer>" * 30]
)


@given(lines=st.lists(lines, min_size=3, max_size=3), context=st.integers(100, 700))
def test_the_parts_are_the_episode(byte_tokenizer, lines: list[str], context: int) -> None:
    """Also when an observation is found that no turn has room to read."""
    agent = agent_of(byte_tokenizer, lines, context)
    trajectory = asyncio.run(agent.play(agent.prompt("Where?")))
    *parts, finished = asyncio.run(follow(agent))
    after = [segment for segment in trajectory.segments if segment.source is not Source.PROMPT]
    transcript = "".join(decode_turn(byte_tokenizer, segment.ids) for segment in after)
    assert "".join(part.text for part in parts if isinstance(part, Part)) == transcript
    assert isinstance(finished, Finished)
    assert (finished.status, finished.num_turns) == (trajectory.status, trajectory.num_turns)
    assert finished.answer == ("Sael" if finished.status == "answered" else None)
    lengths = {source: sum(len(part.ids) for part in after if part.source is source) for source in Source}
    assert (finished.sampled_length, finished.observed_length) == (lengths["policy"], lengths["environment"])
    assert [search.query for search in finished.searches] == [
        event["query"] for event in trajectory.events if event.get("executed")
    ]


def test_feedback_is_a_part_of_its_own(byte_tokenizer) -> None:
    parts = asyncio.run(follow(agent_of(byte_tokenizer, ["no action", f"{THINK}<answer> Sael </answer>"])))
    kinds = [part.kind for part in parts if isinstance(part, Part)]
    assert list(dict.fromkeys(kinds)) == ["text", "feedback", "think", "answer"]
    assert Part("feedback", "\nThe turn was neither.\n") in parts


def test_the_deadline_ends_the_sampling(byte_tokenizer) -> None:
    agent = agent_of(byte_tokenizer, [], stalls=True)
    with pytest.raises(TimeoutError):
        asyncio.run(follow(agent, timeout_s=0.05))
    assert agent.sampler.num_running == 0  # type: ignore[attr-defined]


async def ask(app: Any, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        if not fields:
            return await http.get(path)
        return await http.post(path, json={"messages": [{"role": "user", "content": "Where?"}], **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_an_error_reply(byte_tokenizer, stream: bool) -> None:
    agent = agent_of(byte_tokenizer, [], stalls=True)
    app = create_app(agent, agent.sampler, ServeOptions("m", timeout_s=0.05))
    reply = asyncio.run(ask(app, "/v1/chat/completions", model="m", stream=stream))
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert reply.status_code == (200 if stream else 504)
    if stream:
        assert events.pop() == "[DONE]"
    error = json.loads(events[-1])["error"]
    assert error["type"] == "timeout" and "0.05 s" in error["message"]


def test_health_tells_of_an_engine_that_died(byte_tokenizer) -> None:
    agent = agent_of(byte_tokenizer, [], stalls=True)
    app = create_app(agent, agent.sampler, ServeOptions("m"))
    reply = asyncio.run(ask(app, "/healthz"))
    assert reply.status_code == 503 and reply.json() == {"status": "the engine has died"}
