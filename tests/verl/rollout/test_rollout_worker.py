"""A worker's calls as Ray may begin them: not always in the order in which they were sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from waiting_environment import WaitingEnvironment

from verl.agent.environment import Generation, Outcome, Sampling
from verl.agent.episode import EpisodeLimits
from verl.config import load_config
from verl.protocol import Prompt, Status, Trajectory
from verl.rollout.worker import EpisodeRequest, RolloutWorker


class Engine:
    """Has nothing to end; counts how often it was asked to."""

    weight_version, interrupts = 3, 0

    async def interrupt(self) -> None:
        self.interrupts += 1


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> RolloutWorker:
    """Its episodes last until they are paused."""

    async def play(prompt: Any, group_id: str, *rest: Any) -> Trajectory:
        pause = rest[-1]
        while not pause.has_begun:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # the token that is being sampled
        return Trajectory(group_id, prompt)

    monkeypatch.setattr("verl.rollout.worker.run_episode", play)
    config = load_config("ppo_trainer", [])
    found = RolloutWorker(config, "cpu")
    found.engine, found.environment, found.tokenizer = Engine(), None, None  # type: ignore[assignment]
    found.limits, found._places = None, asyncio.Semaphore(8)  # type: ignore[assignment]
    return found


REQUEST = EpisodeRequest(7, Prompt((1,), "nq", {}), "g", seed=None)


def test_an_interruption_that_comes_before_the_episodes_is_asked_for_again(worker: RolloutWorker) -> None:
    async def calls() -> None:
        assert await worker.interrupt() == []
        playing = asyncio.create_task(worker.play([REQUEST]))
        await asyncio.sleep(0.01)
        [(slot, trajectory)] = await worker.interrupt()
        assert slot == 7 and trajectory.status is None
        assert await playing == []
        assert await worker.play([]) == []  # sent for what was held then

    asyncio.run(calls())


def test_to_abandon_waits_for_episodes_that_are_being_interrupted(worker: RolloutWorker) -> None:
    """The weights are loaded next, which the engine refuses while it has requests."""

    async def calls() -> None:
        playing = asyncio.create_task(worker.play([REQUEST]))
        await asyncio.sleep(0.01)
        interrupted = asyncio.create_task(worker.interrupt())
        await asyncio.sleep(0.01)
        await worker.abandon()
        assert interrupted.done() and worker.engine.interrupts  # type: ignore[attr-defined]
        await playing

    asyncio.run(calls())


class SlowLibrary(WaitingEnvironment):
    """Answers the second turn at once, and the first one when it is let."""

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        if self.asked and self.may_answer.is_set():
            return Outcome("answer", valid=True, done=True)
        await self.search()
        return Outcome("search", valid=True, done=False, reply="found")


class OneWord(Engine):
    async def generate(self, ids: Any, sampling: Sampling) -> Generation:
        return Generation((5,), (-1.0,), "stop")


@pytest.fixture
def searching(byte_tokenizer: Any) -> RolloutWorker:
    """Its episodes search before they answer."""
    found = RolloutWorker(load_config("ppo_trainer", []), "cpu")
    found.engine, found.environment, found.tokenizer = OneWord(), SlowLibrary(), byte_tokenizer  # type: ignore[assignment]
    found.limits = EpisodeLimits(max_turns=2, max_response_length=10, max_context_length=100)
    found._places = asyncio.Semaphore(8)
    return found


def test_a_search_that_an_interruption_leaves_is_answered_to_the_episode_that_goes_on(searching: RolloutWorker) -> None:
    library: Any = searching.environment

    async def calls() -> None:
        playing = asyncio.create_task(searching.play([REQUEST]))
        await asyncio.sleep(0.01)
        [(slot, paused)] = await searching.interrupt()
        assert await playing == [] and (slot, paused.status, paused.open_turn) == (7, None, "stop")
        library.may_answer.set()
        [(slot, ended)] = await searching.play([replace(REQUEST, begun=paused)])
        assert (ended.status, ended.num_turns, ended.num_searches) == (Status.ANSWERED, 2, 1)
        assert (library.asked, library.cancelled) == (1, 0)

    asyncio.run(calls())


def test_to_abandon_cancels_searches_that_were_left(searching: RolloutWorker) -> None:
    library: Any = searching.environment

    async def calls() -> None:
        playing = asyncio.create_task(searching.play([REQUEST]))
        await asyncio.sleep(0.01)
        await searching.interrupt()
        await playing
        assert library.cancelled == 0
        await searching.abandon()
        await asyncio.sleep(0)
        assert library.cancelled == 1

    asyncio.run(calls())
