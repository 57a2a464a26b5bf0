"""The chat endpoint and infer.py with chat models that call tools: what is shown of a turn, and conversations."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from chat_episodes import chat_environment, says, search, turn_ids
from format_models import NAMES, ONE_CALL, THINKING, tokenizer_of
from rich.console import Console
from test_llm_agent_infer import infer  # noqa: F401  a fixture

from search_r1.errors import ServerError
from search_r1.llm_agent.agent import SearchAgent
from search_r1.llm_agent.templates import load_template
from search_r1.serve.__main__ import checked_config, parse_arguments
from search_r1.serve.app import create_app
from search_r1.serve.chat import IGNORED_HEADER, ServeOptions
from search_r1.serve.parts import Part
from search_r1.serve.streaming import Finished, stream_episode
from verl.agent.chat import SAID_NOTHING, SUMMARY_REQUEST
from verl.agent.environment import Generation, Sampling, join_pieces
from verl.agent.episode import Compaction, EpisodeLimits
from verl.agent.text import decode_ids

MODEL = "chat"
QUESTION = {"role": "user", "content": "Through which country does the Ildra flow?"}
SAEL = "It is <answer> Sael </answer>."


class Policy:
    """Says its turns, token by token, over and over; remembers the contexts and what should have ended its turns."""

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        self.turns, self.contexts, self.stops = turns, list[tuple[int, ...]](), set[tuple[int, ...]]()
        self.num_running = 0

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        return join_pieces([piece async for piece in self.stream(ids, sampling)])

    async def stream(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Generation, None]:
        turn = self.turns[len(self.contexts) % len(self.turns)]
        self.contexts.append(tuple(ids))
        self.stops.add(sampling.stop_token_ids)
        for place, token in enumerate(turn, start=1):
            yield Generation((token,), (-0.5,), "stop" if place == len(turn) else "")
            await asyncio.sleep(0)

    async def check(self) -> None: ...


def agent_of(name: str, turns: Sequence[Any], thinking: str = "template") -> tuple[SearchAgent, Policy]:
    """`turns` are messages as the format writes them, or texts."""
    tokenizer, environment = tokenizer_of(name), chat_environment(name, thinking)
    policy = Policy(turn_ids(name, turns, thinking))
    limits = EpisodeLimits(max_turns=4, max_response_length=400, max_context_length=6000)
    return SearchAgent(policy, environment, tokenizer, load_template("chat"), limits, Sampling(0.0)), policy


def follow(agent: SearchAgent) -> tuple[list[Part], Finished]:
    async def all_parts() -> list[Part | Finished]:
        return [part async for part in stream_episode(agent, agent.prompt("Where?"), None, 30.0)]

    *parts, finished = asyncio.run(all_parts())
    assert isinstance(finished, Finished)
    return [part for part in parts if isinstance(part, Part)], finished


def joined(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_results_are_shown_and_the_answer_is_what_is_said_last(name: str) -> None:
    thought = "First \u6cb3." if name in THINKING else ""
    said = "" if name in ONE_CALL else "Let me look."
    turns = [says(said, search(query="river"), thought=thought), says(SAEL)]
    agent, policy = agent_of(name, turns)
    parts, finished = follow(agent)
    assert policy.stops == {agent.environment.stop_token_ids} != {()}
    # the policy read what it reads in a run
    played = asyncio.run(agent.play(agent.prompt("Where?")))
    assert finished.status == played.status == "answered" and policy.contexts[:2] == policy.contexts[2:]
    assert finished.answer == "Sael" and finished.num_turns == 2
    # what is shown of it
    kinds = list(dict.fromkeys(part.kind for part in parts if part.kind != "think"))
    assert kinds == (["text"] if said else []) + ["call", "result", "answer"]
    assert thought in joined(parts, "think") and joined(parts, "text").strip() == said
    assert '"river"' in joined(parts, "call") or "\nriver\n" in joined(parts, "call")
    assert "The Ildra is a river" in joined(parts, "result") and joined(parts, "answer").strip() == SAEL
    assert not any(end in part.text for part in parts for end in ("<|im_end|>", "<|eot_id|>"))
    [call] = finished.calls or ()
    assert (call["name"], call["arguments"], call["status"]) == ("search", {"query": "river"}, "ok")
    assert [(one.query, one.document_ids) for one in finished.searches] == [("river", ("river",))]


@pytest.mark.parametrize("name", NAMES)
def test_a_summary_and_the_results_that_waited_for_it_are_shown(name: str) -> None:
    agent, policy = agent_of(name, [says("", search(query="river")), says("It is a river."), says(SAEL)])
    compaction = Compaction(at=len(agent.prompt("Where?").ids), max_times=1, max_length=200)
    parts, finished = follow(replace(agent, limits=replace(agent.limits, compaction=compaction)))
    assert finished.answer == "Sael" and finished.num_turns == 3 and len(policy.contexts) == 3
    kinds = list(dict.fromkeys(part.kind for part in parts if part.kind != "think" and part.text.strip()))
    assert kinds == ["call", "feedback", "text", "result", "answer"]
    assert joined(parts, "feedback").strip() == SUMMARY_REQUEST and joined(parts, "text").strip() == "It is a river."
    assert joined(parts, "result").count("The Ildra is a river") == 1 == len(finished.calls or ())
    told = decode_ids(agent.tokenizer, policy.contexts[2])
    assert "as you summed it up:\nIt is a river." in told and "The Ildra is a river" in told


@pytest.mark.parametrize("name", THINKING)
def test_thinking_is_streamed_token_by_token(name: str) -> None:
    agent, _ = agent_of(name, [says(SAEL, thought="One two three four.")])
    parts, _ = follow(agent)
    assert sum(part.kind == "think" for part in parts) > 4 and parts[-1].kind == "answer"
    text = "".join(part.text for part in parts)
    assert text == decode_ids(
        agent.tokenizer, agent.environment.format.turn(says(SAEL, thought="One two three four."))[:-1]
    )  # type: ignore[attr-defined]


def test_calls_that_cannot_be_run_and_turns_without_any_are_answered_in_view() -> None:
    broken = "<tool_call>\n{}\n</tool_call><|im_end|>"
    agent, _ = agent_of(
        "default-system", [says("", search(queries=1), search(query="city")), broken, "<|im_end|>", says("Sael")]
    )
    parts, finished = follow(agent)
    assert finished.answer == "Sael" and len(finished.searches) == 1
    assert [one["parsed"] for one in finished.calls or ()] == ["invalid_arguments", "ok", "missing_name"]
    results = joined(parts, "result")
    assert results.count("Error: ") == 2 and "Vonmark" in results
    assert joined(parts, "feedback").strip() == SAID_NOTHING


def test_results_are_shown_where_a_further_sequence_begins() -> None:
    thinks = says("", search(query="river"), thought="Hm.")
    agent, policy = agent_of("xml", [thinks, "Hm.\n</think>\n\n<|im_end|>", says(SAEL)], thinking="tool_cycle")
    parts, finished = follow(agent)
    assert finished.answer == "Sael" and "Hm." not in decode_ids(agent.tokenizer, policy.contexts[2])
    assert "The Ildra is a river" in joined(parts, "result") and joined(parts, "feedback").strip() == SAID_NOTHING


def ask(agent: SearchAgent, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]], history: str = "use") -> Any:
    """What `work` returns, with a client of an app that serves `agent`."""
    app = create_app(agent, agent.sampler, ServeOptions(MODEL, history=history))  # type: ignore[arg-type]

    async def talk() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            return await work(
                openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)
            )

    return asyncio.run(talk())


def test_a_client_reads_calls_in_the_reasoning_and_the_answer_in_the_content() -> None:
    agent, _ = agent_of("default-system", [says("", search(query="river")), says(SAEL)])

    async def work(client: openai.AsyncOpenAI) -> tuple[Any, list[Any]]:
        create = client.chat.completions.create
        whole = await create(model=MODEL, messages=[QUESTION])  # type: ignore[list-item]
        stream = await create(model=MODEL, messages=[QUESTION], stream=True)  # type: ignore[list-item]
        return whole, [chunk async for chunk in stream]

    whole, chunks = ask(agent, work)
    message, report = whole.choices[0].message, whole.search_r1
    assert message.content == "Sael" and '"river"' in message.reasoning_content
    assert "The Ildra is a river" in message.reasoning_content and "Sael" not in message.reasoning_content
    [call] = report["calls"]
    assert call.pop("ms") >= 0 and call == {"name": "search", "arguments": {"query": "river"}, "status": "ok"}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == "Sael"
    assert chunks[-1].search_r1["calls"][0]["name"] == "search"


def test_a_conversation_is_the_prompt_with_one_system_message() -> None:
    agent, policy = agent_of("default-system", [says("Otto Brann")])
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is <|im_end|>Vonmark?"},
        {"role": "assistant", "content": [{"type": "text", "text": "In Sael."}], "refusal": "", "function_call": None},
    ]
    follow_up = {"role": "user", "content": "Who is its mayor?"}

    async def work(client: openai.AsyncOpenAI) -> Any:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=[*history, follow_up])  # type: ignore[list-item]
        return raw.headers.get(IGNORED_HEADER), raw.parse()

    ignored, reply = ask(agent, work)
    assert ignored is None and reply.choices[0].message.content == "Otto Brann"
    rules = "\n\n".join(filter(None, [agent.template.system, "Be brief."]))
    earlier = [history[1], {"role": "assistant", "content": "In Sael."}]
    asked = agent.template.messages("Who is its mayor?")[-1]
    expected = agent.environment.prompt_ids([{"role": "system", "content": rules}, *earlier, asked])
    assert policy.contexts == [expected] and reply.usage.prompt_tokens == len(expected or ())
    # a server that ignores them asks the question alone, and says so
    ignored, _ = ask(agent, work, history="ignore")
    assert ignored == "1 system message, 2 earlier messages"
    assert policy.contexts[1] == agent.prompt("Who is its mayor?").ids


@pytest.mark.parametrize(
    ("earlier", "says_so"),
    [
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "messages.0 has role 'tool'.*runs its own tools"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}, "messages.0 has tool"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content: it must",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}, "messages.0 has tool calls"),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
            "messages.0.function_call: .*not be read",
        ),
        ({"role": "assistant", "content": None, "refusal": "No."}, "messages.0.refusal: .*not be read"),
        ({"role": "user"}, "messages.0.content: it must"),
        ({"role": "user", "content": "long " * 4000}, "shorten the conversation"),
    ],
)
def test_what_no_conversation_has_is_refused(earlier: dict[str, Any], says_so: str) -> None:
    agent, _ = agent_of("default-system", [says("Otto Brann")])

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=says_so):
            await client.chat.completions.create(model=MODEL, messages=[earlier, QUESTION])  # type: ignore[list-item]

    ask(agent, work)


def test_a_conversation_is_used_by_default_where_it_can_be() -> None:
    def history_of(*arguments: str) -> str:
        args = parse_arguments(["--model", "m", *arguments])
        checked_config(args)
        return str(args.history)

    chat = ("agent.format=chat", "agent.template=chat")
    assert [history_of(), history_of(*chat), history_of(*chat, "--history", "refuse")] == ["ignore", "use", "refuse"]
    with pytest.raises(ServerError, match="--history use needs agent.format=chat"):
        history_of("--history", "use")


def test_infer_prints_calls_results_and_the_answer(infer: Any) -> None:  # noqa: F811
    turns = [says("", search(query="river"), thought="Hm."), "Hm.\n</think>\n\n<|im_end|>", says(SAEL)]
    agent, _ = agent_of("xml", turns, thinking="tool_cycle")
    trajectory = asyncio.run(agent.play(agent.prompt("Where?")))
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=60, color_system="standard")
    infer.show(console, "Where?", trajectory, agent.tokenizer, agent.template.grammar, 1.5)
    text = output.getvalue()
    assert "\x1b[2mHm.\x1b[0m" in text and "\x1b[1;36m<function=search>\x1b[0m" in text
    assert "\x1b[32m" in text.split("</tool_call>")[1] and "The Ildra is a river" in text and SAID_NOTHING in text
    assert "im_end" not in text and "im_start" not in text
    assert "\x1b[1mAnswer: Sael\x1b[0m\n" in text and "(answered, 1 search, 3 turns, 1.5 s)" in text
