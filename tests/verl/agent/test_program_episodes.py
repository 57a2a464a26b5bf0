"""Episodes that a program plays by OpenAI's client over HTTP are recorded as they were sampled."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from search_r1.llm_agent.transcript import final_answer, read_turns
from tests.helpers.chat_episodes import chat_trajectory, says, search
from tests.helpers.format_models import NAMES, THINKING, model_format
from tests.helpers.programs import ASKED, Heard, Stage, answering, ask, client_of, tools_of
from verl.agent.environment import Generation, Sampling
from verl.agent.program_kinds import ProgramTask
from verl.agent.text import decode_ids, encode_text
from verl.protocol import Source, Status, Trajectory

TURNS = (says("", search(query="river")), says("", search(query="city")), says("It is Sael."))


def written(stage: Stage, played: Trajectory) -> list[list[tuple[str, str]]]:
    """The sequences as texts: who wrote what."""
    return [
        [(segment.source.value, decode_ids(stage.tokenizer, segment.ids)) for segment in sequence]
        for sequence in played.sequences
    ]


def sampled(played: Trajectory) -> list[tuple[tuple[int, ...], tuple[float, ...] | None]]:
    return [(one.ids, one.log_probs) for one in played.segments if one.source is Source.POLICY]


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


def test_a_token_that_is_a_part_of_a_character_has_no_bytes_in_its_log_prob() -> None:
    seen: list[Any] = []

    async def agent(task: ProgramTask) -> None:
        async with client_of(task) as client:
            reply = await client.chat.completions.create(model="m", messages=ASKED, logprobs=True)
            seen.extend(reply.choices[0].logprobs.content)

    Stage("trimming", agent).play(says("a \U00013080 b"))
    parts = [one for one in seen if "\ufffd" in one.token]
    assert len(parts) > 1 and all(one.bytes is None for one in parts)
    assert all(bytes(one.bytes).decode() == one.token for one in seen if one not in parts)


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


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("Look.\nObservations", ["Observation"], "Look.\n"),
        ('He said "Yes."', ["."], 'He said "Yes'),
        ('{"a": {"b": 1}}', ["}", "1"], '{"a": {"b": '),
        ("none of them<|im_end|>", ["Observation"], "none of them"),
    ],
)
def test_the_last_token_may_reach_past_a_stop_string(text: str, stop: list[str], said: str) -> None:
    seen: list[str] = []

    async def agent(task: ProgramTask) -> None:
        seen.append((await ask(task, ASKED, stop=stop)).content)

    assert Stage("trimming", agent).play(text).num_turns == 1
    assert seen == [said]


def test_results_belong_to_the_calls_that_they_name_in_whatever_order_they_come() -> None:
    """A call that cannot be read has none: the program does not get it."""
    ignored: list[str] = []

    async def agent(task: ProgramTask) -> None:
        tools = list(tools_of("trimming"))
        async with client_of(task) as client:
            given = {"model": "m", "messages": ASKED, "tools": tools, "parallel_tool_calls": False}
            reply = await client.chat.completions.with_raw_response.create(**given)
        ignored.append(reply.headers["x-search-r1-ignored"])
        said = reply.parse().choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"of {call.function.arguments}"}
            for call in reversed(said.tool_calls)
        ]
        await ask(task, [*ASKED, said.model_dump(exclude_none=True), *results], tools=tools)

    unreadable = '<tool_call>\n{"name": "search", "arguments": {"query": "x}}\n</tool_call>\n'
    readable = "".join(
        f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>\n'
        for query in ("river", "city")
    )
    stage = Stage("trimming", agent)
    played = stage.play(unreadable + readable + "<|im_end|>", says("Sael"))
    calls = [(call["parsed"], call.get("result")) for call in played.events[0]["calls"]]
    assert calls == [("invalid_json", None), ("ok", 'of {"query": "river"}'), ("ok", 'of {"query": "city"}')]
    assert played.num_searches == 2 and ignored == ["parallel_tool_calls"]


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
