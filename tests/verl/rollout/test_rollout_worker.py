"""A worker's calls as Ray may begin them: not always in the order in which they were sent."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from waiting_environment import WaitingEnvironment

from verl.agent.environment import Episode, EpisodicEnvironment, Generation, Outcome, Sampling
from verl.agent.episode import EpisodeLimits
from verl.config import load_config
from verl.errors import RolloutError
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


class Notebook(Episode):
    """Waits in its first turn until it is let, and has what it was told in its second."""

    def __init__(self, library: Notebooks) -> None:
        self._library, self._turns, self.closed = library, 0, 0

    async def step(self, text: str, tools_allowed: bool) -> Outcome:
        self._turns += 1
        if self._turns == 1:
            self._library.asked += 1
            await self._library.may_answer.wait()
        return Outcome("note", valid=True, done=self._turns == 2, reply=f"turn {self._turns}")

    async def close(self) -> None:
        self.closed += 1


class Notebooks(EpisodicEnvironment):
    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked = 0
        self.opened: list[Notebook] = []

    async def open(self, prompt: Prompt) -> Episode:
        self.opened.append(Notebook(self))
        return self.opened[-1]

    def closed(self) -> list[int]:
        return [one.closed for one in self.opened]


@pytest.fixture
def keeping(byte_tokenizer: Any) -> Any:
    """Makes workers whose episodes have state."""

    def make() -> RolloutWorker:
        found = RolloutWorker(load_config("ppo_trainer", []), "cpu")
        found.engine, found.environment, found.tokenizer = OneWord(), Notebooks(), byte_tokenizer  # type: ignore[assignment]
        found.limits = EpisodeLimits(max_turns=2, max_response_length=10, max_context_length=100)
        found._places = asyncio.Semaphore(64)
        return found

    return make


async def interrupted(worker: RolloutWorker, *slots: int) -> list[Trajectory]:
    """What an interruption leaves of episodes that wait for their first answer, by slot."""
    books: Any = worker.environment
    asked = books.asked
    playing = asyncio.create_task(worker.play([replace(REQUEST, slot=slot) for slot in slots]))
    while books.asked < asked + len(slots):
        await asyncio.sleep(0.001)
    left = dict(await worker.interrupt())
    assert await playing == []
    return [left[slot] for slot in slots]


async def played(worker: RolloutWorker, begun: list[Trajectory]) -> list[Trajectory]:
    waiting = [replace(REQUEST, slot=slot, begun=one) for slot, one in enumerate(begun)]
    ended: dict[int, Trajectory] = {}
    while len(ended) < len(begun):
        ended |= dict(await worker.play(waiting))
        waiting = []
    return [ended[slot] for slot in range(len(begun))]


def test_interrupted_episodes_with_state_go_on_in_their_worker_and_begin_again_in_another(keeping: Any) -> None:
    """16 rollouts of one prompt: half of them move to another worker."""
    here, there = keeping(), keeping()

    async def calls() -> None:
        paused = await interrupted(here, *range(16))
        assert all(one.status is None and one.num_turns == 1 for one in paused)
        assert here.environment.closed() == [0] * 16
        here.environment.may_answer.set()
        there.environment.may_answer.set()
        # A Ray call brings copies.
        stayed, moved = await played(here, deepcopy(paused[::2])), await played(there, deepcopy(paused[1::2]))
        for one in (*stayed, *moved):
            assert (one.status, one.num_turns, len(one.events)) == (Status.ANSWERED, 2, 2)
        assert here.environment.asked == 16 and there.environment.asked == 8
        assert sorted(here.environment.closed()) == [0] * 8 + [1] * 8 and there.environment.closed() == [1] * 8
        await here.abandon()
        assert here.environment.closed() == [1] * 16
        [again] = await played(here, deepcopy(paused[:1]))
        assert again.status is Status.ANSWERED and here.environment.closed() == [1] * 17

    asyncio.run(calls())


@pytest.mark.parametrize("way", ["abandon", "shutdown"])
def test_to_abandon_or_shut_down_closes_episodes_that_run_and_those_that_were_left(keeping: Any, way: str) -> None:
    worker = keeping()
    worker.engine.shutdown = lambda: None  # type: ignore[attr-defined]

    async def calls() -> None:
        await interrupted(worker, 0, 1)
        playing = asyncio.create_task(worker.play([REQUEST]))
        while worker.environment.asked < 3:
            await asyncio.sleep(0.001)
        assert worker.environment.closed() == [0, 0, 0]
        await getattr(worker, way)()
        assert worker.environment.closed() == [1, 1, 1]
        await playing

    asyncio.run(calls())


def test_an_error_of_one_episode_closes_all_of_the_worker(keeping: Any) -> None:
    worker = keeping()

    async def calls() -> None:
        playing = asyncio.create_task(worker.play([replace(REQUEST, slot=slot) for slot in range(3)]))
        while worker.environment.asked < 3:
            await asyncio.sleep(0.001)
        worker.environment.opened[1].step = None  # its next turn
        worker.environment.may_answer.set()
        with pytest.raises(RolloutError, match=r"group g \(nq\): TypeError"):
            await playing
        assert worker.environment.closed() == [1, 1, 1]

    asyncio.run(calls())
