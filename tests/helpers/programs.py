"""Programs that play episodes, in front of a policy that says its turns by heart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from chat_episodes import QUESTION, chat_environment, turn_ids
from format_models import DATE, tokenizer_of
from openai import APIStatusError, AsyncOpenAI
from scripted_policy import Script

from search_r1.serve.policy_endpoint import PolicyEndpoint
from verl.agent.environment import Generation, Sampler, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.pause import Pause
from verl.agent.program import ProgramEnvironment
from verl.agent.program_kinds import Function, Program, ProgramTask
from verl.protocol import Prompt, Trajectory

ASKED = [{"role": "user", "content": QUESTION}]
Play = Callable[[ProgramTask], Awaitable[Any]]


def client_of(task: ProgramTask) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)


async def ask(task: ProgramTask, messages: Sequence[Any], **options: Any) -> Any:
    """The policy's message after `messages`."""
    async with client_of(task) as client:
        reply = await client.chat.completions.create(model="gpt-4o", messages=list(messages), **options)
    return reply.choices[0].message


async def refused(task: ProgramTask, **call: Any) -> APIStatusError:
    """What the endpoint says of a call that differs from one it answers by `call`."""
    async with client_of(task) as client:
        with pytest.raises(APIStatusError) as error:
            await client.chat.completions.create(**{"model": "m", "messages": ASKED} | call)
    return error.value


def tools_of(name: str) -> Sequence[Any]:
    return chat_environment(name).schemas


def answering(results: dict[str, str], tools: Sequence[Any]) -> Play:
    """An agent that answers each call of the tool `search` with the result of its query, until there is none."""

    async def agent(task: ProgramTask) -> str:
        messages: list[Any] = [*task.messages]
        while True:
            said = await ask(task, messages, tools=list(tools))
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return str(said.content)
            for call in said.tool_calls:
                result = results[json.loads(call.function.arguments)["query"]]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return agent


def two_turns(begun: list[int]) -> Play:
    """An agent that asks twice, the second time with what it was told, and counts its starts in `begun`."""

    async def agent(task: ProgramTask) -> str:
        begun.append(1)
        said = await ask(task, ASKED)
        told = [*ASKED, {"role": "assistant", "content": said.content}, {"role": "user", "content": "And?"}]
        return str((await ask(task, told)).content)

    return agent


@dataclass
class Stage:
    """Where `program` plays episodes, with the tokenizer `name` of `format_models`."""

    name: str
    program: Play | Program
    limits: EpisodeLimits = field(default_factory=lambda: EpisodeLimits(6, 400, 6000, step_timeout_s=20))
    thinking: str = "template"
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        options = {"thinking": self.thinking, "options": DATE}
        program = self.program if isinstance(self.program, Program) else Function(self.program)
        self.tokenizer = tokenizer_of(self.name)
        among = ("the program", program, PolicyEndpoint(), self.tokenizer, self.limits)
        self.environment = ProgramEnvironment(*among, host=self.host, format_options=options)
        row = {"question": QUESTION, "reward_model": {"ground_truth": {"target": ["Sael"]}}}
        self.prompt = Prompt(self.environment.prompt_ids(ASKED), "rivers", row, messages=ASKED)

    def script(self, turns: Sequence[Any]) -> Heard:
        return Heard(Script(turn_ids(self.name, turns, self.thinking)))

    async def episode(
        self, sampler: Sampler, begun: Trajectory | None = None, pause: Pause | None = None, seed: int | None = None
    ) -> Trajectory:
        among = (sampler, self.environment, self.tokenizer, Sampling(), self.limits, seed, begun, pause)
        return await run_episode(self.prompt, "g", *among)

    def play(self, *turns: Any) -> Trajectory:
        """A whole episode in which the policy says `turns`: messages, or texts."""
        return asyncio.run(self.play_and_close(self.script(turns)))

    async def play_and_close(self, sampler: Sampler) -> Trajectory:
        try:
            return await self.episode(sampler)
        finally:
            await self.environment.close()


@dataclass
class Heard:
    """A sampler that keeps what it was asked, and the turns that it gave: `log_probs` are different for each token."""

    sampler: Sampler
    contexts: list[list[int]] = field(default_factory=list)
    turns: list[Generation] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)

    async def generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        self.contexts.append(list(ids))
        self.asked.append(sampling)
        given = await self.sampler.generate(ids, sampling)
        number = len(self.turns)
        log_probs = tuple(-(number + 1) - place / 64 for place in range(len(given.ids)))
        self.turns.append(replace(given, log_probs=log_probs))
        return self.turns[-1]
