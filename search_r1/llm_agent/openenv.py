"""Environments of OpenEnv (0.10) as programs: the policy's turns are actions, observations are what it reads next.

    async def play(task):
        return await play_openenv(task, "ws://127.0.0.1:8000/ws", Form(lambda text: {"message": text}))

An environment runs as a server of its own, in an environment of its own. Of its package nothing is needed here: it
speaks small JSON over a WebSocket, one reply for each message, and each connection is an episode.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient

from verl.agent.program_kinds import ProgramTask
from verl.agent.session import TOO_LONG, TURN_LIMIT
from verl.errors import EnvironmentUnavailable
from verl.score import read_number

CAPACITY = ("CAPACITY_REACHED",)
_TLS = ssl.create_default_context()  # takes longer than a call: made once
_LOOK_S = 0.2  # between attempts to get a place in a server that is full
_LARGEST_BYTES = 64 << 20


def observation_text(observation: Mapping[str, Any]) -> str:
    """An observation as JSON, without what it says about itself."""
    return json.dumps({name: part for name, part in observation.items() if name != "metadata"}, ensure_ascii=False)


@dataclass(frozen=True)
class Form:
    """How the policy's text becomes an action, an observation a text, and a row of the prompt file what a reset gets
    (`seed` and whatever else the environment takes)."""

    action: Callable[[str], Mapping[str, Any]]
    shown: Callable[[Mapping[str, Any]], str] = observation_text
    reset: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: {}


class OpenEnvError(Exception):
    """An error reply of the server. `code` is OpenEnv's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


async def play_openenv(
    task: ProgramTask, url: str, form: Form, *, max_steps: int | None = None, wait_s: float = 300.0
) -> dict[str, Any]:
    """Play an episode until the environment is done, had `max_steps` actions, or refuses one, which ends it too, or
    until the turns or the tokens of the rollout are used up.

    Returns `turn_rewards`, the reward of each turn, with `reward` 0 beside them, and the `refusal`, if there was one.
    A server without a free place is asked again for `wait_s` seconds. Raises `EnvironmentUnavailable`, and what the
    client of OpenAI raises for a call that the policy's endpoint refuses for another reason than these limits.
    """
    messages: list[Any] = [*task.messages]
    rewards: list[float] = []
    try:
        async with aiohttp.ClientSession() as session, DefaultAsyncHttpxClient(verify=_TLS) as http:
            client = AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=http)
            connection, state = await _begin(session, url, dict(form.reset(task.row)), wait_s)
            try:
                # What the policy reads of the environment is a user message; its turn is the next action.
                while not state["done"] and (max_steps is None or len(rewards) < max_steps):
                    messages.append({"role": "user", "content": form.shown(state["observation"])})
                    try:
                        reply = await client.chat.completions.create(model=task.model, messages=messages)
                    except APIStatusError as error:
                        # At a limit of the rollout the rewards so far count. Any other error must not become a reward.
                        if error.code not in (TURN_LIMIT, TOO_LONG):
                            raise
                        break
                    text = reply.choices[0].message.content or ""
                    messages.append({"role": "assistant", "content": text})
                    try:
                        state = await _exchange(connection, "step", dict(form.action(text)))
                    except OpenEnvError as error:
                        # An action in the wrong form is the policy's doing; any other error is infrastructure.
                        if error.code != "VALIDATION_ERROR":
                            raise
                        return {"reward": 0.0, "turn_rewards": [*rewards, 0.0], "refusal": str(error)}
                    rewards.append(_number(state.get("reward")))
            finally:
                await connection.close()
    except (OpenEnvError, aiohttp.ClientError, OSError) as error:
        raise EnvironmentUnavailable(f"the environment at {url}: {type(error).__name__}: {error}") from error
    return {"reward": 0.0, "turn_rewards": rewards}


async def _begin(
    session: aiohttp.ClientSession, url: str, data: dict[str, Any], wait_s: float
) -> tuple[aiohttp.ClientWebSocketResponse, dict[str, Any]]:
    """A connection, and the first observation. Raises `OpenEnvError` and what `aiohttp` raises."""
    end = asyncio.get_running_loop().time() + wait_s
    # A full server lets clients connect, and refuses the reset: each attempt needs a connection of its own.
    while True:
        connection = await session.ws_connect(url, max_msg_size=_LARGEST_BYTES)
        try:
            return connection, await _exchange(connection, "reset", data)
        except OpenEnvError as error:
            await connection.close()
            if error.code not in CAPACITY or asyncio.get_running_loop().time() > end:
                raise
        except BaseException:
            await connection.close()
            raise
        await asyncio.sleep(_LOOK_S)


async def _exchange(connection: aiohttp.ClientWebSocketResponse, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """The data of the reply to a message: `observation`, `reward`, `done`."""
    try:
        await connection.send_str(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await connection.receive_str())
        given: dict[str, Any] = reply["data"]
        if reply["type"] == "error":
            raise OpenEnvError(str(given.get("code")), str(given.get("message")))
        if not isinstance(given["observation"], Mapping) or not isinstance(given["done"], bool):
            raise KeyError("observation, done")
    except (ValueError, TypeError, KeyError) as error:
        raise OpenEnvError("NOT_OPENENV", f"it answered {kind} with no observation: {error!r}") from error
    return given


def _number(reward: Any) -> float:
    """A reward as a number: none is 0."""
    try:
        return 0.0 if reward is None else read_number(reward)
    except ValueError as error:
        raise OpenEnvError("NOT_OPENENV", f"its reward is {reward!r}") from error
