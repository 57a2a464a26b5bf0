"""What an interrupted episode has asked its environment goes on being answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from copy import deepcopy
from typing import Any

import pytest
from waiting_environment import WaitingEnvironment

from verl.agent.environment import Generation, Outcome, Sampling
from verl.agent.episode import EpisodeLimits, run_episode
from verl.agent.pause import OpenAnswers, Pause
from verl.agent.text import encode_text
from verl.errors import EnvironmentUnavailable
from verl.protocol import Prompt, Status, Trajectory

LIMITS = EpisodeLimits(max_turns=3, max_response_length=40, max_context_length=400)


class Sampler:
    """Searches once, then answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def generate(self, ids: Any, sampling: Sampling) -> Generation:
        text = "say b" if "book" in self._tokenizer.decode(list(ids)) else "ask a"
        sampled = encode_text(self._tokenizer, text)
        return Generation(sampled, (-0.5,) * len(sampled), "stop")


class Library(WaitingEnvironment):
    """Finds a book once it `may_answer`."""

    stop_strings = ("!",)
    is_open = True

    async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
        if text.startswith("say"):
            return Outcome("answer", valid=True, done=True)
        await self.search()
        if not self.is_open:
            raise EnvironmentUnavailable("the library is closed")
        return Outcome("search", valid=True, done=False, reply="\nbook\n")


async def settle() -> None:
    """Until whatever can happen has happened: nothing here waits for a clock."""
    for _ in range(50):
        await asyncio.sleep(0)


class Scene:
    """Episodes of one worker, which share their answers."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.library, self.answers = tokenizer, Library(), OpenAnswers()
        self.prompt = Prompt(encode_text(tokenizer, "question: "), "test", {})

    def episode(self, group: str, pause: Pause, begun: Trajectory | None = None) -> asyncio.Task[Trajectory]:
        among = (Sampler(self.tokenizer), self.library, self.tokenizer, Sampling(), LIMITS, 7, begun, pause)
        return asyncio.create_task(run_episode(self.prompt, group, *among))

    async def interrupted(self, *groups: str) -> list[Trajectory]:
        """Episodes that wait for their search when a pause comes."""
        pause, asked = Pause(self.answers), self.library.asked
        episodes = [self.episode(group, pause) for group in groups]
        await self.searches(asked + len(groups))
        pause.begin()
        return await asyncio.gather(*episodes)

    async def searches(self, number: int) -> None:
        """Until that many searches were asked in all."""
        while self.library.asked < number:
            await asyncio.sleep(0)

    async def resumed(self, trajectory: Trajectory) -> Trajectory:
        return await self.episode(trajectory.group_id, Pause(self.answers), trajectory)


@pytest.fixture
def play(byte_tokenizer: Any) -> Callable[[Callable[[Scene], Coroutine[Any, Any, None]]], None]:
    async def with_scene(plot: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
        await plot(Scene(byte_tokenizer))

    return lambda plot: asyncio.run(with_scene(plot))


def test_a_search_goes_on_over_an_interruption(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        [paused] = await scene.interrupted("g0")
        assert (paused.status, paused.open_turn, paused.num_searches) == (None, "stop", 0)
        scene.library.may_answer.set()
        await settle()
        ended = await scene.resumed(paused)
        assert (scene.library.asked, scene.library.cancelled) == (1, 0)
        assert (ended.status, ended.num_searches) == (Status.ANSWERED, 1)
        assert [event["turn"] for event in ended.events] == [0, 1]
        whole = await scene.episode("g1", Pause())
        assert ended.ids == whole.ids and scene.library.asked == 2

    play(plot)


def test_an_episode_that_goes_on_waits_for_the_search_that_is_under_way(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        [paused] = await scene.interrupted("g0")
        going_on = asyncio.create_task(scene.resumed(paused))
        await settle()
        assert not going_on.done()
        scene.library.may_answer.set()
        assert (await going_on).status is Status.ANSWERED and scene.library.asked == 1

    play(plot)


def test_each_search_of_a_group_is_answered_to_one_episode(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        paused = await scene.interrupted("g0", "g0", "g1")
        scene.library.may_answer.set()
        ended = await asyncio.gather(*(scene.resumed(one) for one in (*paused, deepcopy(paused[0]))))
        assert all(one.status is Status.ANSWERED for one in ended)
        assert scene.library.asked == 4, "three were under way, the fourth episode had to ask"

    play(plot)


def test_a_search_that_fails_meanwhile_fails_the_episode_that_goes_on(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        [paused] = await scene.interrupted("g0")
        scene.library.is_open = False
        scene.library.may_answer.set()
        await settle()
        ended = await scene.resumed(paused)
        assert (ended.status, ended.failure) == (Status.FAILED, "the library is closed")

    play(plot)


def test_a_search_that_nobody_comes_for_is_cancelled_at_the_second_interruption_after_its_own(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        await scene.interrupted("g0")
        await scene.interrupted("g1")
        assert scene.library.cancelled == 0
        [paused] = await scene.interrupted("g2")
        await settle()
        assert scene.library.cancelled == 1
        scene.answers.forget()
        await settle()
        assert scene.library.cancelled == 3
        scene.library.may_answer.set()
        assert (await scene.resumed(paused)).status is Status.ANSWERED and scene.library.asked == 4

    play(plot)


def test_an_episode_that_is_cancelled_cancels_its_search(play: Any) -> None:
    async def plot(scene: Scene) -> None:
        episode = scene.episode("g0", Pause(scene.answers))
        await scene.searches(1)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert (scene.library.asked, scene.library.cancelled) == (1, 1)

    play(plot)
