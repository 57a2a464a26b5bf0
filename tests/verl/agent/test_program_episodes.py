"""Episodes that a program plays by OpenAI's client over HTTP: what is recorded, and how they end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest

from search_r1.llm_agent.transcript import final_answer, read_turns
from tests.helpers.chat_episodes import chat_environment, chat_trajectory, says, search
from tests.helpers.format_models import NAMES, THINKING, model_format, tokenizer_of
from tests.helpers.programs import ASKED, Heard, Play, Stage, answering, ask, client_of
from verl.agent.environment import INTERRUPTED, Generation, Sampling, environment_class
from verl.agent.episode import EpisodeLimits
from verl.agent.pause import OpenAnswers, Pause
from verl.agent.program import ProgramEnvironment
from verl.agent.program_kinds import ProgramTask
from verl.agent.text import decode_ids, encode_text
from verl.config import load_config
from verl.errors import ConfigError, RolloutError
from verl.protocol import Source, Status, Trajectory

TURNS = (says("", search(query="river")), says("", search(query="city")), says("It is Sael."))


def tools_of(name: str) -> Sequence[Any]:
    return chat_environment(name).schemas


def written(stage: Stage, played: Trajectory) -> list[list[tuple[str, str]]]:
    """The sequences as texts: who wrote what."""
    return [
        [(segment.source.value, decode_ids(stage.tokenizer, segment.ids)) for segment in sequence]
        for sequence in played.sequences
    ]


def sampled(played: Trajectory) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    return [(one.ids, one.log_probs) for one in played.segments if one.source is Source.POLICY]


# What is recorded.


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_at_the_endpoint_is_recorded_as_the_built_in_agent_is(name: str) -> None:
    """Token by token: the same policy, tools and results."""
    own = chat_trajectory(name, TURNS)
    results = {call["query"]: call["result"] for event in own.events for call in event["calls"]}
    stage = Stage(name, answering(results, tools_of(name)))
    played = stage.play(*TURNS)
    assert [(one.source, one.ids) for one in played.segments] == [(one.source, one.ids) for one in own.segments]
    assert (played.status, played.num_turns, played.num_searches, played.num_valid_actions) == (
        Status.ANSWERED, 3, 2, own.num_valid_actions,
    )  # fmt: skip
    assert [event["query"] for event in played.events[:2]] == ["river", "city"]
    turns = read_turns(played, stage.tokenizer)
    assert final_answer(turns) == "It is Sael."
    assert [turn.observation for turn in turns] == [results["river"], results["city"], ""]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_log_probs_are_those_of_the_sampler_whatever_the_text_would_be_read_as(name: str) -> None:
    """The policy spells its turn in single characters, which no tokenizer does, and the program sends it back."""
    stage = Stage(name, answering({"river": "a river"}, tools_of(name)))
    turn = model_format(name).turn(says("", search(query="river")))
    spelled = [token for one in decode_ids(stage.tokenizer, turn[:-1]) for token in encode_text(stage.tokenizer, one)]
    tags = [token for token in turn if token in stage.tokenizer.get_added_vocab().values()]
    if tags != [turn[-1]]:  # tags that are tokens cannot be spelled
        spelled = list(turn[:-1])
    heard = stage.script([])
    heard.sampler.turns = [[*spelled, turn[-1]], model_format(name).turn(says("Sael"))]  # type: ignore[attr-defined]
    played = asyncio.run(stage.play_and_close(heard))
    assert sampled(played) == [(one.ids, one.log_probs) for one in heard.turns]
    assert heard.contexts[1] == played.ids[: len(heard.contexts[1])], "the second turn was sampled after what is stored"
    assert len(played.sequences) == 1


def test_another_conversation_is_a_sequence_of_its_own_and_the_first_goes_on() -> None:
    """A sub-agent in between; its answer is not the rollout's."""

    async def agent(task: ProgramTask) -> None:
        first = await ask(task, ASKED)
        helper = await ask(task, [{"role": "system", "content": "Be a helper."}, {"role": "user", "content": "Help."}])
        more = {"role": "user", "content": f"The helper says: {helper.content}"}
        await ask(task, [*ASKED, {"role": "assistant", "content": first.content}, more])

    stage = Stage("trimming", agent)
    played = stage.play(says("one"), says("two"), says("three"))
    main, helper = written(stage, played)
    assert [source for source, _ in main] == ["prompt", "policy", "environment", "policy"]
    assert [source for source, _ in helper] == ["context", "policy"]
    assert "The helper says: two" in main[2][1] and "Be a helper." in helper[0][1]
    assert [event["text"] for event in played.events] == ["one", "three", "two"]
    assert [event["turn"] for event in played.events] == [0, 1, 2]
    assert final_answer(read_turns(played, stage.tokenizer)) == "three"


def test_two_that_go_on_from_one_reply_at_once_both_have_it_as_it_was_sampled() -> None:
    async def agent(task: ProgramTask) -> str:
        first = await ask(task, ASKED)
        told = [*ASKED, {"role": "assistant", "content": first.content}]
        both = [ask(task, [*told, {"role": "user", "content": text}]) for text in ("left?", "right?")]
        await asyncio.gather(*both)
        return "both"

    stage = Stage("trimming", agent)
    heard = stage.script([])
    # The first turn is spelled by single characters.
    spelled = [token for one in "go on" for token in encode_text(stage.tokenizer, one)]
    turns = [[*spelled, stage.environment.format_for(False).stop_token_ids[0]]]
    turns += [list(model_format("trimming").turn(says(text))) for text in ("l", "r")]
    heard.sampler.turns = turns  # type: ignore[attr-defined]
    played = asyncio.run(stage.play_and_close(heard))
    assert [[source for source, _ in one] for one in written(stage, played)] == [
        ["prompt", "policy", "environment", "policy"],
        ["context", "policy"],
    ]
    begins = (*played.segments[0].ids, *heard.turns[0].ids)
    assert heard.turns[0].ids[:-1] == tuple(spelled)
    context = played.sequences[1][0].ids
    assert context[: len(begins)] == begins, "the fork has the ids of the turn, not its text read again"
    assert final_answer(read_turns(played, stage.tokenizer)) == "both"


@pytest.mark.parametrize("name", THINKING)
def test_thinking_that_has_to_leave_the_context_begins_a_further_sequence(name: str) -> None:
    """And it is written where the format keeps it, although the program does not send it back."""

    async def agent(task: ProgramTask) -> None:
        messages: list[Any] = [*ASKED]
        for text in ("Are you sure?", "Really?"):
            said = await ask(task, messages)
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": text}]
        await ask(task, messages)

    turns = [says("one", thought="hm"), says("two", thought="so"), says("three", thought="ah")]
    stage = Stage(name, agent)
    dropped = written(stage, stage.play(*turns))
    assert len(dropped) == 3
    assert "hm" not in dropped[1][0][1] and "one" in dropped[1][0][1]
    kept = Stage(name, agent, thinking="all")
    [whole] = written(kept, kept.play(*turns))
    assert "hm" in whole[1][1]


def test_a_history_that_was_changed_is_rendered_anew() -> None:
    async def agent(task: ProgramTask) -> None:
        said = await ask(task, ASKED)
        summary = {"role": "user", "content": f"So far: {said.content[:3]}"}
        await ask(task, [*ASKED, {"role": "assistant", "content": "Noted."}, summary])

    stage = Stage("trimming", agent)
    played = stage.play(says("a long text"), says("Sael"))
    first, second = written(stage, played)
    assert "Noted." in second[0][1] and "a long text" not in second[0][1]
    assert first[1] == ("policy", "a long text<|im_end|>")


def test_token_ids_go_on_token_by_token_and_come_back_with_log_probs() -> None:
    seen: list[Any] = []

    async def agent(task: ProgramTask) -> None:
        prompt = list(stage.prompt.ids)
        async with client_of(task) as client:
            for _ in range(2):
                reply = await client.completions.create(
                    model="m", prompt=prompt, logprobs=1, extra_body={"return_token_ids": True}
                )
                choice = reply.choices[0]
                seen.append((choice.token_ids, choice.logprobs.token_logprobs, reply.usage.prompt_tokens))
                assert choice.prompt_token_ids == prompt
                prompt += [*choice.token_ids, *encode_text(stage.tokenizer, " more")]

    stage = Stage("trimming", agent)
    heard = stage.script([says("one"), says("two")])
    played = asyncio.run(stage.play_and_close(heard))
    assert [(tuple(ids), tuple(values)) for ids, values, _ in seen] == sampled(played)
    assert [count for *_, count in seen] == [len(context) for context in heard.contexts]
    [sequence] = written(stage, played)
    assert [source for source, _ in sequence] == ["prompt", "policy", "environment", "policy"]
    assert sequence[2][1] == " more"


def test_a_chat_reply_has_ids_log_probs_and_usage_and_a_stream_says_the_same() -> None:
    seen: dict[str, Any] = {}

    async def agent(task: ProgramTask) -> None:
        async with client_of(task) as client:
            create, tools = client.chat.completions.create, list(tools_of("trimming"))
            options = {"model": "m", "messages": ASKED, "tools": tools}
            seen["whole"] = await create(**options, logprobs=True, extra_body={"return_token_ids": True})
            stream = await create(**options, stream=True, stream_options={"include_usage": True})
            seen["stream"] = [chunk async for chunk in stream]
            raw = await client.chat.completions.with_raw_response.create(**options, temperature=0.2, seed=3)
            seen["ignored"] = raw.headers["X-Search-R1-Ignored"]

    stage = Stage("trimming", agent)
    heard = stage.script([says("Let me see.", search(query="river"))] * 3)
    asyncio.run(stage.play_and_close(heard))
    whole, (chunk, usage) = seen["whole"], seen["stream"]
    choice = whole.choices[0]
    assert tuple(choice.token_ids) == heard.turns[0].ids
    assert tuple(one.logprob for one in choice.logprobs.content) == heard.turns[0].log_probs
    assert tuple(whole.prompt_token_ids) == tuple(heard.contexts[0])
    assert whole.usage.prompt_tokens == usage.usage.prompt_tokens == len(heard.contexts[0])
    assert whole.usage.completion_tokens == len(heard.turns[0].ids)
    assert choice.finish_reason == chunk.choices[0].finish_reason == "tool_calls"
    assert choice.message.content == chunk.choices[0].delta.content == "Let me see."
    [call], [piece] = choice.message.tool_calls, chunk.choices[0].delta.tool_calls
    assert (call.function.name, call.function.arguments) == ("search", '{"query": "river"}')
    assert piece.function == replace_call(piece.function, call.function)
    assert seen["ignored"] == "seed, temperature"
    assert {one.temperature for one in heard.asked} == {1.0}, "the run's own"


def replace_call(piece: Any, function: Any) -> Any:
    return piece.model_copy(update={"name": function.name, "arguments": function.arguments})


def test_a_stop_string_ends_a_turn_and_is_not_in_its_text() -> None:
    async def agent(task: ProgramTask) -> None:
        said = await ask(task, ASKED, stop=["</go>"], max_tokens=90)
        assert said.content == "then"
        again = {"role": "user", "content": "and?"}
        await ask(task, [*ASKED, {"role": "assistant", "content": said.content}, again], max_completion_tokens=33)

    stage = Stage("trimming", agent)
    heard = stage.script(["then</go>", says("Sael")])
    played = asyncio.run(stage.play_and_close(heard))
    assert [(one.stop, one.max_tokens) for one in heard.asked] == [(("</go>",), 90), ((), 33)]
    [sequence] = written(stage, played)
    assert sequence[1] == ("policy", "then</go>") and sequence[2][1].startswith("<|im_end|>")


def test_with_a_seed_turns_have_seeds_of_their_own_that_are_the_same_again() -> None:
    async def agent(task: ProgramTask) -> None:
        for _ in range(2):
            await ask(task, ASKED)

    async def seeds(seed: int | None) -> list[int | None]:
        stage = Stage("trimming", agent)
        heard = stage.script([says("a"), says("b")])
        await stage.episode(heard, seed=seed)
        await stage.environment.close()
        return [one.seed for one in heard.asked]

    first, again, other = (asyncio.run(seeds(seed)) for seed in (5, 5, 6))
    assert first == again != other and len(set(first)) == 2
    assert asyncio.run(seeds(None)) == [None, None]


def test_a_call_that_its_client_gives_up_leaves_no_trace() -> None:
    class Slow(Heard):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
            if not self.contexts:
                self.contexts.append([])
                await asyncio.sleep(60)
            return await super().generate(ids, sampling)

    async def agent(task: ProgramTask) -> None:
        async with client_of(task) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.3, max_retries=0).chat.completions.create(model="m", messages=ASKED)
        await ask(task, [{"role": "user", "content": "Again."}])

    stage = Stage("trimming", agent)
    slow = Slow(stage.script([says("Sael")]).sampler)
    played = asyncio.run(stage.play_and_close(slow))
    [sequence] = written(stage, played)
    assert (played.status, len(sequence)) == (Status.ANSWERED, 2) and "Again." in sequence[0][1]


def test_a_call_that_the_program_leaves_behind_is_not_sampled_on() -> None:
    """It would be in the engine while the weights change."""
    ended: list[str] = []

    class Slow(Heard):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
            if len(self.turns) == 1:
                try:
                    await asyncio.sleep(60)
                finally:
                    ended.append("cancelled")
            return await super().generate(ids, sampling)

    async def agent(task: ProgramTask) -> str:
        said = await ask(task, ASKED)
        left = asyncio.create_task(ask(task, [{"role": "user", "content": "Again."}]))
        await asyncio.sleep(0.5)
        assert not left.done()
        kept.append(left)
        return str(said.content)

    kept: list[asyncio.Task[Any]] = []
    stage = Stage("trimming", agent)
    played = asyncio.run(stage.play_and_close(Slow(stage.script([says("Sael")]).sampler)))
    assert (played.status, played.num_turns, ended) == (Status.ANSWERED, 1, ["cancelled"])


def test_a_program_that_shortens_its_history_when_it_is_told_to_goes_on() -> None:
    async def agent(task: ProgramTask) -> None:
        error = await refused(task, messages=[{"role": "user", "content": "x" * 900}])
        assert error.code == "context_length_exceeded"
        await ask(task, ASKED)

    played = Stage("trimming", agent, EpisodeLimits(4, 40, 200, step_timeout_s=20)).play(says("Sael"))
    assert (played.status, played.num_turns) == (Status.ANSWERED, 1)


# Calls that are refused.


async def refused(task: ProgramTask, **call: Any) -> openai.APIStatusError:
    async with client_of(task) as client:
        with pytest.raises(openai.APIStatusError) as error:
            await client.chat.completions.create(**{"model": "m", "messages": ASKED} | call)
    return error.value


CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "[1]"}}


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


@pytest.mark.parametrize("crashes", [False, True])
def test_the_limits_of_a_run_end_its_rollouts_whether_the_program_bears_it_or_not(crashes: bool) -> None:
    """Neither is infrastructure: the policy has used up what it had."""

    async def agent(task: ProgramTask) -> None:
        for text in ("a", "b", "c"):
            try:
                await ask(task, [{"role": "user", "content": text * length}])
            except openai.BadRequestError as error:
                codes.append(error.code)
                if crashes:
                    raise

    codes: list[Any] = []
    length = 1
    limits = EpisodeLimits(1, 40, 200, step_timeout_s=20)
    played = Stage("trimming", agent, limits).play(says("1"), says("2"), says("3"))
    assert (played.status, played.num_turns, codes) == (Status.TURN_LIMIT, 2, ["turn_limit"])
    length, codes = 4000, []
    played = Stage("trimming", agent, limits).play()
    assert played.num_turns == 0 and played.status is (Status.FAILED), "no turn: the program's own prompt is too long"
    assert "a call was refused: the context has" in str(played.failure) and set(codes) == {"context_length_exceeded"}


def test_a_context_that_outgrows_the_run_is_the_policys() -> None:
    async def agent(task: ProgramTask) -> None:
        said = await ask(task, ASKED)
        await ask(
            task, [*ASKED, {"role": "assistant", "content": said.content}, {"role": "user", "content": "x" * 900}]
        )

    played = Stage("trimming", agent, EpisodeLimits(4, 40, 200, step_timeout_s=20)).play(says("1"), says("2"))
    assert (played.status, played.num_turns) == (Status.LENGTH_LIMIT, 1)
    assert "BadRequestError" in played.events[0]["failure"]


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


# How a program ends.


async def crash(task: ProgramTask) -> None:
    await ask(task, ASKED)
    raise RuntimeError("the shelf fell over")


def test_a_program_that_crashes_is_infrastructure_and_says_why() -> None:
    played = Stage("trimming", crash).play(says("Sael"))
    assert played.status is Status.FAILED
    assert "RuntimeError: the shelf fell over (test_program_episodes.py:" in str(played.failure)
    assert played.num_turns == 1, "what was sampled can be read"


@pytest.mark.parametrize(
    "turn",
    [
        pytest.param("<tool_call>\n{", id="a call that cannot be read"),
        pytest.param(says("", {"type": "function", "function": {"name": "open", "arguments": {}}}), id="another tool"),
        pytest.param(says("", search(query=3)), id="wrong arguments"),
        pytest.param("", id="nothing"),
        pytest.param(says("x" * 500), id="cut off"),
    ],
)
def test_a_crash_behind_a_bad_turn_is_the_policys(turn: Any) -> None:
    async def agent(task: ProgramTask) -> None:
        await ask(task, ASKED, tools=list(tools_of("trimming")))
        raise RuntimeError("no")

    played = Stage("trimming", agent).play(turn)
    assert (played.status, played.failure) == (Status.TURN_LIMIT, None)
    assert "RuntimeError: no" in played.events[0]["failure"] and played.events[0]["action"] == "invalid"
    assert final_answer(read_turns(played, tokenizer_of("trimming"))) is None


def test_what_cannot_be_read_as_a_call_reaches_the_program_as_text() -> None:
    seen: list[Any] = []

    async def agent(task: ProgramTask) -> None:
        tools = list(tools_of("trimming"))
        seen.append(said := await ask(task, ASKED, tools=tools))
        told = [*ASKED, said.model_dump(exclude_none=True), {"role": "user", "content": "What?"}]
        await ask(task, told, tools=tools)

    stage = Stage("trimming", agent)
    played = stage.play("Look: <tool_call>\n{<|im_end|>", says("Sael"))
    assert seen[0].content.startswith("Look: <tool_call>") and not seen[0].tool_calls
    assert len(played.sequences) == 1, "sent back as it came, it is the same turn"


def test_a_program_that_asks_nothing_and_one_that_hangs_are_infrastructure() -> None:
    async def nothing(task: ProgramTask) -> float:
        return 1.0

    async def hangs(task: ProgramTask) -> None:
        await ask(task, ASKED)
        await asyncio.sleep(60)

    played = Stage("trimming", nothing).play()
    assert played.status is Status.FAILED and "ended without a turn of the policy" in str(played.failure)
    limits = EpisodeLimits(6, 40, 400, step_timeout_s=0.3)
    played = Stage("trimming", hangs, limits).play(says("a"))
    assert played.status is Status.FAILED and "made no call for 0.3 s (agent.step_timeout_s)" in str(played.failure)


def test_time_in_the_sampler_is_not_the_programs() -> None:
    class Slow(Heard):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
            await asyncio.sleep(0.8)
            return await super().generate(ids, sampling)

    async def agent(task: ProgramTask) -> None:
        await ask(task, ASKED)

    stage = Stage("trimming", agent, EpisodeLimits(6, 40, 400, step_timeout_s=0.4))
    played = asyncio.run(stage.play_and_close(Slow(stage.script([says("a")]).sampler)))
    assert played.status is Status.ANSWERED


@pytest.mark.parametrize(
    ("result", "kept"),
    [
        (None, {}),
        (0.5, {"reward": 0.5}),
        (True, {"reward": 1.0}),
        ("Sael", {"answer": "Sael"}),
        ({"answer": "a", "reward": 1, "steps": [1]}, {"answer": "a", "reward": 1, "steps": [1]}),
    ],
)
def test_what_a_program_returns_is_kept(result: Any, kept: dict[str, Any]) -> None:
    async def agent(task: ProgramTask) -> Any:
        await ask(task, ASKED)
        return result

    stage = Stage("trimming", agent)
    played = stage.play(says("said"))
    assert played.events[-1]["program"] == kept
    assert (
        played.events[-1]["answer"] == final_answer(read_turns(played, stage.tokenizer)) == kept.get("answer", "said")
    )


def test_turn_rewards_are_those_of_the_calls_in_their_order_whichever_sequence_they_are_in() -> None:
    async def agent(task: ProgramTask) -> Any:
        first = await ask(task, ASKED)
        await ask(task, [{"role": "user", "content": "Help."}])
        more = {"role": "user", "content": "And?"}
        await ask(task, [*ASKED, {"role": "assistant", "content": first.content}, more])
        return {"turn_rewards": [1, 2, 3]}

    played = Stage("trimming", agent).play(says("one"), says("two"), says("three"))
    assert [(event["text"], event["turn_reward"]) for event in played.events] == [("one", 1), ("three", 3), ("two", 2)]


@pytest.mark.parametrize(
    "result",
    [object(), [1], {"reward": float("nan")}, float("inf"), {"turn_rewards": [1, 2]}, {"turn_rewards": ["high"]}],
)
def test_a_result_that_is_none_is_told(result: Any) -> None:
    async def agent(task: ProgramTask) -> Any:
        await ask(task, ASKED)
        return result

    with pytest.raises(ConfigError, match="the program 'the program' returned"):
        Stage("trimming", agent).play(says("said"))


def test_an_error_of_the_engine_ends_the_rollout_as_that_error_and_the_program_with_it() -> None:
    ended: list[str] = []

    class Broken(Heard):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
            raise RolloutError("the engine died")

    async def agent(task: ProgramTask) -> None:
        try:
            await asyncio.sleep(0) if ended else await ask(task, ASKED)
        except openai.InternalServerError as error:
            ended.append(str(error.code))
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    stage = Stage("trimming", agent)
    with pytest.raises(RolloutError, match="the engine died"):
        asyncio.run(stage.play_and_close(Broken(stage.script([]).sampler)))
    assert ended in ([], ["engine_failed"], ["cancelled"])


# Interruptions.


@dataclass
class Cut(Heard):
    """Cuts the turns that are sampled when it is interrupted after their first two ids."""

    cuts: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        self.contexts.append(list(ids))
        whole = turns_of(self)[0]
        if not self.cuts.is_set():
            await self.cuts.wait()
            return Generation(whole[:2], (-1.0, -1.0), INTERRUPTED, weight_version=1)
        turns_of(self).pop(0)
        rest = tuple(whole[sampling.num_begun :])
        return Generation(rest, (-2.0,) * len(rest), "stop", weight_version=2)


def turns_of(cut: Cut) -> list[Any]:
    turns: list[Any] = cut.sampler.turns  # type: ignore[attr-defined]
    return turns


def two_turns(begun: list[int]) -> Play:
    async def agent(task: ProgramTask) -> str:
        begun.append(1)
        said = await ask(task, ASKED)
        told = [*ASKED, {"role": "assistant", "content": said.content}, {"role": "user", "content": "And?"}]
        return str((await ask(task, told)).content)

    return agent


async def interrupted(stage: Stage, cut: Cut, answers: OpenAnswers) -> Trajectory:
    """An episode that was paused within its first turn."""
    pause = Pause(answers)
    playing = asyncio.create_task(stage.episode(cut, pause=pause))
    while not cut.contexts:
        await asyncio.sleep(0.01)
    pause.begin()
    await asyncio.sleep(0.05)
    assert not playing.done(), "it waits for the turn that the engine is about to cut"
    cut.cuts.set()
    return await playing


def test_a_turn_that_an_interruption_cut_goes_on_where_it_ended_and_the_program_never_knows() -> None:
    async def scene() -> None:
        answers, begun = OpenAnswers(), list[int]()
        stage = Stage("trimming", two_turns(begun))
        cut = Cut(stage.script([says("first"), says("second")]).sampler)
        paused = await interrupted(stage, cut, answers)
        assert (paused.status, paused.num_turns) == (None, 1) and paused.episode_key is not None
        assert len(paused.segments[-1].ids) == 2
        await asyncio.sleep(0.2)
        assert len(cut.contexts) == 1, "nothing is sampled while it is interrupted"
        played = await stage.episode(cut, begun=paused, pause=Pause(answers))
        await stage.environment.close()
        assert (played.status, played.num_turns, begun) == (Status.ANSWERED, 2, [1])
        first = played.segments[1]
        assert first.weight_versions == ((1, 2), (2, len(first.ids) - 2)) and played.weight_version == 2
        assert decode_ids(stage.tokenizer, first.ids) == "first<|im_end|>"
        assert final_answer(read_turns(played, stage.tokenizer)) == "second"

    asyncio.run(scene())


def test_a_program_whose_state_is_lost_begins_again_and_one_that_nobody_resumes_is_ended() -> None:
    async def scene() -> None:
        answers, begun = OpenAnswers(), list[int]()
        stage = Stage("trimming", two_turns(begun))
        cut = Cut(stage.script([says("first"), says("second")]).sampler)
        paused = await interrupted(stage, cut, answers)
        answers.forget()
        await answers.closed()
        assert not stage.environment.sessions._open, "its session is closed"
        played = await stage.episode(cut, begun=paused, pause=Pause(OpenAnswers()))
        await stage.environment.close()
        assert (played.status, begun) == (Status.ANSWERED, [1, 1])
        assert decode_ids(stage.tokenizer, played.segments[1].ids) == "first<|im_end|>"

    asyncio.run(scene())


def test_a_run_keeps_how_its_retriever_was_started_as_without_a_program() -> None:
    plain, run = load_config("tinywiki_chat"), load_config("tinywiki_chat", ["agent.program=example.openai_agent.play"])
    files = environment_class(run).files(run)
    assert environment_class(run) is ProgramEnvironment
    assert files and files == environment_class(plain).files(plain)


# The trial before a run.


def test_the_trial_plays_an_episode_and_says_what_is_wrong_with_the_program() -> None:
    async def trial(program: Play) -> Any:
        stage = Stage("trimming", program)
        try:
            return await stage.environment.step(stage.prompt, stage.environment.example_turn, False)
        finally:
            await stage.environment.close()

    outcome = asyncio.run(trial(two_turns([])))
    assert (outcome.action, outcome.done, outcome.status) == ("answer", True, Status.ANSWERED)
    with pytest.raises(Exception, match="the shelf fell over"):
        asyncio.run(trial(crash))


# Many at once.


@pytest.mark.slow
def test_no_call_of_ten_thousand_is_lost_or_changed_with_256_programs_at_once() -> None:
    """The benchmark checks each one: what the client got, what was sampled, and what is recorded."""
    bench = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "door.py"
    done = subprocess.run(
        [sys.executable, str(bench), "--sessions", "256", "--calls", "40", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.stdout.startswith("10240 calls of 256 sessions at once"), done.stderr[-3000:]
