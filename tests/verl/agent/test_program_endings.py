"""How an episode of a program ends, and what is kept of what it returned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from search_r1.llm_agent.transcript import final_answer, read_turns
from tests.helpers.chat_episodes import says, search
from tests.helpers.format_models import tokenizer_of
from tests.helpers.programs import ASKED, Heard, Stage, ask, refused, tools_of
from verl.agent.environment import Generation, Sampling
from verl.agent.episode import EpisodeLimits
from verl.agent.program_kinds import ProgramTask
from verl.errors import ConfigError, RolloutError
from verl.protocol import Status


def test_a_program_that_shortens_its_history_when_it_is_told_to_goes_on() -> None:
    async def agent(task: ProgramTask) -> None:
        error = await refused(task, messages=[{"role": "user", "content": "x" * 900}])
        assert error.code == "context_length_exceeded"
        await ask(task, ASKED)

    played = Stage("trimming", agent, EpisodeLimits(4, 40, 200, step_timeout_s=20)).play(says("Sael"))
    assert (played.status, played.num_turns) == (Status.ANSWERED, 1)


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


async def crash(task: ProgramTask) -> None:
    await ask(task, ASKED)
    raise RuntimeError("the shelf fell over")


def test_a_program_that_crashes_is_infrastructure_and_says_why() -> None:
    played = Stage("trimming", crash).play(says("Sael"))
    assert played.status is Status.FAILED
    assert "RuntimeError: the shelf fell over (test_program_endings.py:" in str(played.failure)
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
            await asyncio.sleep(3.5)
            return await super().generate(ids, sampling)

    async def agent(task: ProgramTask) -> None:
        await ask(task, ASKED)

    stage = Stage("trimming", agent, EpisodeLimits(6, 40, 400, step_timeout_s=3))
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
        ({"answer": None}, {"answer": None}),
        ({"answer": ""}, {"answer": ""}),
    ],
)
def test_what_a_program_returns_is_kept(result: Any, kept: dict[str, Any]) -> None:
    async def agent(task: ProgramTask) -> Any:
        await ask(task, ASKED)
        return result

    stage = Stage("trimming", agent)
    played = stage.play(says("said"))
    assert played.events[-1]["program"] == kept
    answer = "said" if kept.get("answer") is None else kept["answer"]
    assert played.events[-1]["answer"] == answer
    assert final_answer(read_turns(played, stage.tokenizer)) == (answer or None)


def test_turn_rewards_are_those_of_the_calls_in_their_order_whichever_sequence_they_are_in() -> None:
    async def agent(task: ProgramTask) -> Any:
        first = await ask(task, ASKED)
        await ask(task, [{"role": "user", "content": "Help."}])
        more = {"role": "user", "content": "And?"}
        await ask(task, [*ASKED, {"role": "assistant", "content": first.content}, more])
        return {"turn_rewards": [1, 2, 3]}

    played = Stage("trimming", agent).play(says("one"), says("two"), says("three"))
    assert [(event["text"], event["turn_reward"]) for event in played.events] == [("one", 1), ("three", 3), ("two", 2)]


def test_turn_rewards_of_calls_that_overlap_are_in_the_order_in_which_they_began() -> None:
    """The first one ends last."""
    second_is_done = asyncio.Event()

    class Slow(Heard):
        async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
            if len(self.contexts) == 1:
                return await super().generate(ids, sampling)
            self.contexts.append(list(ids))
            await second_is_done.wait()
            self.contexts.pop()
            return await super().generate(ids, sampling)

    async def agent(task: ProgramTask) -> Any:
        first = asyncio.create_task(ask(task, ASKED))
        while not slow.contexts:
            await asyncio.sleep(0.01)
        await ask(task, [{"role": "user", "content": "Help."}])
        second_is_done.set()
        await first
        return {"turn_rewards": [1, 2]}

    stage = Stage("trimming", agent)
    slow = Slow(stage.script([says("second"), says("first")]).sampler)
    played = asyncio.run(stage.play_and_close(slow))
    assert {event["text"]: event["turn_reward"] for event in played.events} == {"first": 1, "second": 2}


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
