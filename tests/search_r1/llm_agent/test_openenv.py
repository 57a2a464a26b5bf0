"""An environment of OpenEnv, played over its WebSocket: the messages are those that OpenEnv 0.10 was seen to send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from search_r1.llm_agent.openenv import Form, play_openenv
from search_r1.rewards.program import ProgramReward
from tests.helpers.chat_episodes import says
from tests.helpers.programs import Stage
from verl.agent.episode import EpisodeLimits
from verl.agent.program_kinds import ProgramTask
from verl.protocol import Source, Status, Trajectory
from verl.trainer.sampling.scoring import score_trajectories

FORM = Form(
    action=lambda text: {"message": text} if text != "wrong" else {"msg": text},
    shown=lambda observation: str(observation["echoed_message"]),
    reset=lambda row: {"seed": row.get("seed", 7)},
)
LIMITS = EpisodeLimits(6, 400, 6000, step_timeout_s=20)


@dataclass
class Echo:
    """The environment of `openenv init`, with place for one episode; `breaks`: what it does wrong."""

    breaks: str = ""
    reward: Any = None  # of each action, in place of its length
    heard: list[Any] = field(default_factory=list)
    num_open: int = 0
    num_refused: int = 0

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open and self.breaks != "many":
            self.num_refused += 1
            await socket.send_json({"type": "error", "data": {"message": "1/1 active", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.num_open += 1
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(self.reply(json.loads(message.data)))
        self.num_open -= 1
        return socket

    def reply(self, message: Any) -> str:
        self.heard.append(message)
        data = message["data"]
        if message["type"] == "reset":
            seen = {"metadata": {}, "echoed_message": "ready!", "message_length": 0}
            return json.dumps({"type": "observation", "data": {"observation": seen, "reward": 0.0, "done": False}})
        if self.breaks == "no JSON":
            return "<html>"
        if self.breaks == "raises":
            return json.dumps({"type": "error", "data": {"message": "division by zero", "code": "EXECUTION_ERROR"}})
        if "message" not in data:
            return json.dumps({"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}})
        said = data["message"]
        seen = {"metadata": {"step": 1}, "echoed_message": said, "message_length": len(said)}
        reward = (len(said) * 0.1 if said else None) if self.reward is None else self.reward
        state = {"observation": seen, "reward": reward, "done": said == "bye"}
        return json.dumps({"type": "observation", "data": state})


@asynccontextmanager
async def served(echo: Echo) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/ws", echo.talk)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"ws://127.0.0.1:{runner.addresses[0][1]}/ws"
    finally:
        await runner.cleanup()


def played(
    echo: Echo, *scripts: list[str], limits: EpisodeLimits = LIMITS, **options: Any
) -> tuple[Stage, list[Trajectory]]:
    """Episodes, all at once, in which the policy says the lines of a script."""

    async def program(task: ProgramTask) -> Any:
        return await play_openenv(task, url, FORM, **options)

    async def scene() -> list[Trajectory]:
        nonlocal url
        async with served(echo) as url:
            episodes = [stage.episode(stage.script([says(text) for text in script])) for script in scripts]
            try:
                return list(await asyncio.gather(*episodes))
            finally:
                await stage.environment.close()

    url = ""
    stage = Stage("trimming", program, limits)
    return stage, asyncio.run(scene())


def test_turns_are_actions_and_observations_are_read_and_rewarded_turn_by_turn() -> None:
    echo = Echo()
    stage, [rollout] = played(echo, ["hello", "to all", "bye"])
    assert [message["type"] for message in echo.heard] == ["reset", "step", "step", "step"]
    assert echo.heard[0]["data"] == {"seed": 7} and echo.heard[1]["data"] == {"message": "hello"}
    assert rollout.status is Status.ANSWERED and len(rollout.sequences) == 1
    read = [stage.tokenizer.decode(one.ids) for one in rollout.segments if one.source is not Source.POLICY]
    assert ["ready!" in read[0], "hello" in read[1], "to all" in read[2]] == [True] * 3
    [scored] = score_trajectories(ProgramReward(), [rollout], stage.tokenizer)
    assert scored.turn_rewards == pytest.approx((0.5, 0.6, 0.3)) and scored.reward == pytest.approx(1.4)


def test_an_environment_that_never_ends_has_so_many_steps() -> None:
    _, [rollout] = played(Echo(), ["a", "b", "c"], max_steps=2)
    assert (rollout.status, rollout.num_turns) == (Status.ANSWERED, 2)


@pytest.mark.parametrize(
    ("limits", "status", "num_turns"),
    [
        pytest.param(replace(LIMITS, max_turns=2), Status.TURN_LIMIT, 3, id="turns"),
        pytest.param(replace(LIMITS, max_context_length=120), Status.LENGTH_LIMIT, 4, id="tokens"),
    ],
)
def test_at_a_limit_of_the_rollout_the_rewards_so_far_count(
    limits: EpisodeLimits, status: Status, num_turns: int
) -> None:
    stage, [rollout] = played(Echo(), ["hello"] * 6, limits=limits)
    assert (rollout.status, rollout.num_turns, "failure" in rollout.events[-1]) == (status, num_turns, False)
    [scored] = score_trajectories(ProgramReward(), [rollout], stage.tokenizer)
    assert scored.turn_rewards == pytest.approx((0.5,) * num_turns) and scored.reward == pytest.approx(0.5 * num_turns)


def test_a_call_that_is_refused_for_another_reason_is_infrastructure() -> None:
    """Its session is gone after the first turn, whose reward is no result."""

    async def program(task: ProgramTask) -> Any:
        def act(text: str) -> dict[str, str]:
            stage.environment.sessions.close(task.base_url.split("/")[-2])
            return {"message": text}

        return await play_openenv(task, url, replace(FORM, action=act))

    async def scene() -> Trajectory:
        nonlocal url
        async with served(Echo()) as url:
            return await stage.play_and_close(stage.script([says("hello")] * 2))

    url = ""
    stage = Stage("trimming", program)
    rollout = asyncio.run(scene())
    assert (rollout.status, rollout.num_turns) == (Status.FAILED, 1)
    assert "there is no session of that address" in str(rollout.failure)


def test_episodes_wait_for_a_place_in_a_server_that_is_full() -> None:
    echo = Echo()
    _, rollouts = played(echo, *[["bye"]] * 3)
    assert [one.status for one in rollouts] == [Status.ANSWERED] * 3 and echo.num_refused


def test_an_action_that_the_environment_refuses_is_the_policys() -> None:
    stage, [rollout] = played(Echo(), ["hello", "wrong"])
    assert rollout.status is Status.ANSWERED
    assert rollout.events[-1]["program"]["refusal"] == "Invalid message (VALIDATION_ERROR)"
    [scored] = score_trajectories(ProgramReward(), [rollout], stage.tokenizer)
    assert scored.turn_rewards == pytest.approx((0.5, 0.0))


@pytest.mark.parametrize(("breaks", "words"), [("no JSON", "NOT_OPENENV"), ("raises", "division by zero")])
def test_an_environment_that_fails_is_infrastructure(breaks: str, words: str) -> None:
    _, [rollout] = played(Echo(breaks), ["hello"])
    assert rollout.status is Status.FAILED and words in str(rollout.failure)


@pytest.mark.parametrize("reward", ["abc", [1.0], {"score": 1}, float("nan"), "0.5"])
def test_a_reward_that_is_no_number_is_infrastructure(reward: Any) -> None:
    _, [rollout] = played(Echo(reward=reward), ["hello"])
    assert rollout.status is Status.FAILED and f"its reward is {reward!r}" in str(rollout.failure)


def test_a_server_that_is_not_there_or_stays_full_is_infrastructure() -> None:
    full = Echo(num_open=1)
    _, [rollout] = played(full, ["hello"], wait_s=0.3)
    assert rollout.status is Status.FAILED and "CAPACITY_REACHED" in str(rollout.failure) and full.num_refused > 1

    async def nobody(task: ProgramTask) -> Any:
        return await play_openenv(task, "ws://127.0.0.1:9/ws", FORM)

    away = Stage("trimming", nobody).play()
    assert away.status is Status.FAILED and "the environment at ws://127.0.0.1:9/ws" in str(away.failure)
