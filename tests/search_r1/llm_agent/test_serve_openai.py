"""What ordinary OpenAI clients send and read, and how an episode is streamed; the policy's lines are scripted."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_agent_scripted import agent_of

from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.grammar import SEARCH_R1
from search_r1.serve.app import create_app
from search_r1.serve.chat import IGNORED_HEADER, ServeOptions
from search_r1.serve.parts import Part, merged
from search_r1.serve.streaming import Finished, stream_episode
from search_r1.viewer.segments import split_segment
from verl.agent.environment import SUMMARY_REQUEST, Episode, EpisodicEnvironment, Outcome
from verl.agent.episode import Compaction
from verl.agent.text import decode_turn, encode_text
from verl.errors import ConfigError
from verl.protocol import WAITING, Prompt, Source, Trajectory, turns_of_segments

MODEL = "org/search-r1"
QUESTION = {"role": "user", "content": "Where?"}
HISTORY = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello!"},
]
ANSWER = ["<think> hm </think><answer> Sael </answer>"]
SEARCHED = ["<think> hm </think><search> river </search>", "<answer> Sael </answer>"]


def ask(tokenizer: Any, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]], lines: list[str], **options: Any) -> Any:
    """What `work` returns, with a client of an app whose policy says `lines`."""
    agent = agent_of(tokenizer, lines)
    app = create_app(agent, agent.sampler, ServeOptions(MODEL, **options))  # type: ignore[arg-type]

    async def talk() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            base_url = "http://test/v1"
            return await work(openai.AsyncOpenAI(base_url=base_url, api_key="k", http_client=http, max_retries=0))

    return asyncio.run(talk())


def test_the_model_is_found_by_its_name(byte_tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        listed = [model async for model in client.models.list()]
        assert [await client.models.retrieve(MODEL)] == listed
        with pytest.raises(openai.NotFoundError, match="this server has 'org/search-r1'") as caught:
            await client.models.retrieve("gpt")
        assert caught.value.code == "model_not_found"

    ask(byte_tokenizer, work, ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_a_system_prompt_and_the_turns_before_are_not_read_and_that_is_said(
    byte_tokenizer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async def work(client: openai.AsyncOpenAI) -> list[tuple[Any, int]]:
        found = []
        for messages in ([QUESTION], [*HISTORY, QUESTION]):
            create = client.chat.completions.with_raw_response.create
            options = {"stream_options": {"include_usage": True}} if stream else {}
            raw = await create(model=MODEL, messages=messages, stream=stream, reasoning_effort="low", **options)
            reply = raw.parse()
            usage = [chunk async for chunk in reply][-1].usage if stream else reply.usage
            found.append((raw.headers.get(IGNORED_HEADER), usage.prompt_tokens))
        return found

    with caplog.at_level(logging.INFO):
        alone, after_history = ask(byte_tokenizer, work, ANSWER)
    assert alone[0] is None and after_history[0] == "1 system message, 2 earlier messages"
    assert alone[1] == after_history[1]  # the policy was given the same prompt
    assert "ignored 1 system message, 2 earlier messages" in caplog.text


def test_history_is_an_error_where_the_server_refuses_it(byte_tokenizer) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="1 system message, 2 earlier messages") as caught:
            await client.chat.completions.create(model=MODEL, messages=[*HISTORY, QUESTION])
        assert caught.value.param == "messages"
        assert (await client.chat.completions.create(model=MODEL, messages=[QUESTION])).choices

    ask(byte_tokenizer, work, ANSWER, history="refuse")


def test_events_end_only_where_lines_end(byte_tokenizer) -> None:
    """Many clients read a stream by lines, and take U+2028, U+2029 and U+0085 for the end of one."""
    ends = "a\u2028b\u0085c\u2029d"

    async def work(client: openai.AsyncOpenAI) -> tuple[str, bytes]:
        request = {"model": MODEL, "messages": [QUESTION], "stream": True}
        raw = await client._client.post("http://test/v1/chat/completions", json=request)
        return "".join(
            [
                getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
                async for chunk in await client.chat.completions.create(**request)
            ]
        ), raw.content

    reasoning, content = ask(byte_tokenizer, work, [f"<think> {ends} \u6cb3 </think><answer> Sael </answer>"])
    lines = content.decode().splitlines()
    assert all(not line or line.startswith("data: ") for line in lines)
    assert ends in reasoning and "\u6cb3" in content.decode()


def test_a_line_a_request(byte_tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.create
        await create(model=MODEL, messages=[QUESTION])
        _ = [chunk async for chunk in await create(model=MODEL, messages=[QUESTION], stream=True)]
        with pytest.raises(openai.NotFoundError):
            await create(model="gpt", messages=[QUESTION])
        for path in ("healthz", "health", "metrics", "v1/no%0asuch"):
            await client._client.get(f"http://test/{path}")

    with caplog.at_level(logging.INFO, logger="search_r1.serve"):
        ask(byte_tokenizer, work, SEARCHED)
    chat, streamed, refused, other = (record.getMessage() for record in caplog.records)
    for line in (chat, streamed):
        form = r"POST /v1/chat/completions 200 \d+\.\d\d s, \d+\+\d+ tokens, 1 search, answered"
        assert re.fullmatch(form, line), line
    assert refused.startswith("POST /v1/chat/completions 404 ") and "tokens" not in refused
    assert other.startswith("GET /v1/no%0Asuch 404 ")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="search_r1.serve"):
        ask(byte_tokenizer, work, SEARCHED, access_log=False)
    assert not caplog.records


THINK = "<think> \u6cb3 </think>"
RIVER, CITY = f"{THINK}<search> river </search>", "<search> city </search>"


async def follow(agent: SearchAgent, timeout_s: float = 30.0) -> list[Part | Finished]:
    return [part async for part in stream_episode(agent, agent.prompt("Where?"), None, timeout_s)]


class Reader(Episode):
    """Says how many turns there were; at the second one in place of everything before."""

    def __init__(self, opened: list[Reader]) -> None:
        opened.append(self)
        self.turns = self.closed = 0

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        self.turns += 1
        said = " ".join(["The turn was"] * self.turns)
        if self.turns == 2:
            return Outcome("note", True, False, context=[{"role": "user", "content": said}])
        return Outcome("answer" if self.turns == 3 else "page", True, self.turns == 3, reply=said)

    async def close(self) -> None:
        self.closed += 1


class Reading(EpisodicEnvironment):
    def __init__(self, opened: list[Reader]) -> None:
        self.opened = opened

    async def open(self, prompt: Prompt) -> Episode:
        return Reader(self.opened)


def test_an_episode_with_state_is_followed_over_its_sequences_and_closed(byte_tokenizer) -> None:
    opened: list[Reader] = []
    agent = replace(agent_of(byte_tokenizer, ["a", "b", ANSWER[0]]), environment=Reading(opened))
    trajectory = asyncio.run(agent.play(agent.prompt("Where?")))
    assert len(trajectory.sequences) == 2
    *parts, finished = asyncio.run(follow(agent))
    after = [segment for segment in trajectory.segments if segment.source is not Source.PROMPT]
    transcript = "".join(decode_turn(byte_tokenizer, segment.ids) for segment in after)
    assert "".join(part.text for part in parts if isinstance(part, Part)) == transcript
    assert isinstance(finished, Finished)
    assert (finished.status, finished.answer, finished.num_turns) == ("answered", "Sael", 3)
    stalled = replace(agent_of(byte_tokenizer, ["a"], stalls=True), environment=Reading(opened))
    with pytest.raises(TimeoutError):
        asyncio.run(follow(stalled, timeout_s=0.1))
    assert [one.closed for one in opened] == [1, 1, 1]


class Nothing(EpisodicEnvironment):
    async def open(self, prompt: Prompt) -> Episode:
        return None  # type: ignore[return-value]


def test_an_episode_that_is_none_is_named_where_it_is_followed(byte_tokenizer) -> None:
    agent = replace(agent_of(byte_tokenizer, ANSWER), environment=Nothing())
    with pytest.raises(ConfigError, match="open of .*Nothing gave None, which is no Episode"):
        asyncio.run(follow(agent))


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


class CutsItsContext(SearchAgent):
    """Its second turn continues the first, its third begins a further sequence, without the turns in between."""

    async def play(self, prompt: Prompt, seed: int | None = None, group_id: str = "question") -> Trajectory:
        reply = encode_text(self.tokenizer, "</information>\n\n")
        first = await self.sampler.generate(prompt.ids, self.sampling)
        await self.sampler.generate((*prompt.ids, *first.ids, *reply), self.sampling)
        await self.sampler.generate((*prompt.ids, *reply, *reply), self.sampling)
        return await super().play(prompt, seed, group_id)


def test_what_a_further_sequence_repeats_was_not_observed(byte_tokenizer) -> None:
    agent = agent_of(byte_tokenizer, [f"{THINK}<answer> Sael </answer>", CITY, CITY])
    finished = asyncio.run(follow(CutsItsContext(**vars(agent))))[-1]
    assert isinstance(finished, Finished)
    assert finished.observed_length == len(encode_text(byte_tokenizer, "</information>\n\n"))


def test_a_summary_and_the_reply_that_waited_for_it_are_shown(byte_tokenizer) -> None:
    agent = agent_of(byte_tokenizer, [RIVER, f"<summary> {ANSWER[0]} </summary>", "<answer> Vonmark </answer>"], 1500)
    compaction = Compaction(at=len(agent.prompt("Where?").ids) + 60, max_times=1, max_length=60)
    agent = replace(agent, limits=replace(agent.limits, compaction=compaction))
    trajectory = asyncio.run(agent.play(agent.prompt("Where?")))
    assert len(trajectory.sequences) == 2
    *parts, finished = asyncio.run(follow(agent))
    shown = merged([part for part in parts if isinstance(part, Part)])
    waited = trajectory.events[0][WAITING]
    texts = [decode_turn(byte_tokenizer, one.ids) for one in trajectory.segments]
    assert "".join(part.text for part in shown) == "".join([*texts[1:4], waited, *texts[5:]])
    asked, replied = (next(part.text for part in shown if part.kind == kind) for kind in ("feedback", "information"))
    assert asked == texts[2] == f"\n\n{SUMMARY_REQUEST}\n\n" and replied == waited
    # The answer in the summary is none, and the search before it is one search.
    assert isinstance(finished, Finished)
    assert (finished.status, finished.answer, finished.num_turns) == ("answered", "Vonmark", 3)
    assert [search.query for search in finished.searches] == ["river"]

    # The viewer cuts the stored segments alike.
    turns, cut = list(turns_of_segments((one.source for one in trajectory.segments), trajectory.events)), []
    for segment, text, turn in zip(trajectory.segments, texts, turns, strict=True):
        event = trajectory.events[turn] if turn >= 0 else None
        cut.append([part.kind for part in split_segment(segment.source, text, event, SEARCH_R1)])
    assert cut[2:5] == [["feedback"], ["summary"], ["text"]] and cut[5] == ["answer"]


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


async def asked(app: Any, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        if not fields:
            return await http.get(path)
        return await http.post(path, json={"messages": [{"role": "user", "content": "Where?"}], **fields})


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_an_error_reply(byte_tokenizer, stream: bool) -> None:
    agent = agent_of(byte_tokenizer, [], stalls=True)
    app = create_app(agent, agent.sampler, ServeOptions("m", timeout_s=0.05))
    reply = asyncio.run(asked(app, "/v1/chat/completions", model="m", stream=stream))
    events = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert reply.status_code == (200 if stream else 504)
    assert stream or reply.headers["x-should-retry"] == "false"
    if stream:
        assert events.pop() == "[DONE]"
    error = json.loads(events[-1])["error"]
    assert error["type"] == "timeout" and "0.05 s" in error["message"]


class Failing(EpisodicEnvironment):
    """Fails as soon as it is asked, which it counts in `opened`."""

    def __init__(self, error: Exception) -> None:
        self.error, self.opened = error, 0

    async def open(self, prompt: Prompt) -> Episode:
        self.opened += 1
        raise self.error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "says"),
    [(KeyError("hunter2"), "internal error"), (ConfigError("a setting is wrong"), "a setting is wrong")],
)
def test_an_environment_that_fails_is_an_error_reply_which_clients_do_not_repeat(
    byte_tokenizer, caplog: pytest.LogCaptureFixture, stream: bool, error: Exception, says: str
) -> None:
    environment = Failing(error)
    agent = replace(agent_of(byte_tokenizer, ANSWER), environment=environment)
    app = create_app(agent, agent.sampler, ServeOptions(MODEL))  # type: ignore[arg-type]

    async def talk() -> str:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http)
            with pytest.raises(openai.APIError, match=says) as caught:
                reply = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=stream)  # type: ignore[arg-type, list-item]
                _ = [chunk async for chunk in reply]
            body: dict[str, Any] = caught.value.body  # type: ignore[assignment]
            assert body["type"] == "server_error" and "hunter2" not in str(caught.value)
            return (await http.get("http://test/metrics")).text

    counted = asyncio.run(talk())
    assert environment.opened == 1 and "search_r1_errors_total 1.0" in counted
    if stream and isinstance(error, KeyError):
        assert "Traceback" in caplog.text and "hunter2" in caplog.text


def test_health_tells_of_an_engine_that_died(byte_tokenizer) -> None:
    agent = agent_of(byte_tokenizer, [], stalls=True)
    app = create_app(agent, agent.sampler, ServeOptions("m"))
    reply = asyncio.run(asked(app, "/healthz"))
    assert reply.status_code == 503 and reply.json() == {"status": "the engine has died"}
