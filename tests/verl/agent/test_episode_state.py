"""An episode with state is opened and closed once, and never continued with the state of another time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
from counting_episodes import LIMITS, Count, Counting, Scene, settle

from verl.agent.environment import INTERRUPTED, Environment, Episode, Outcome
from verl.agent.pause import Pause
from verl.errors import EnvironmentUnavailable, RolloutError
from verl.protocol import Prompt, Status

# Life and death


def test_each_rollout_has_an_episode_of_its_own_which_is_closed(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        ended = await asyncio.gather(*(scene.play("a!", "b!", "say", group=f"g{n}") for n in range(5)))
        assert {scene.text(one) for one in ended} == {"question: a![1]b![2]say"}
        assert [one.turns for one in scene.world.opened] == [3] * 5 and scene.world.all_closed()

    asyncio.run(plot())


@pytest.mark.parametrize(
    ("lines", "limits", "status"),
    [
        (["a!"], LIMITS, Status.TURN_LIMIT),
        (["a!"], replace(LIMITS, max_context_length=16), Status.LENGTH_LIMIT),
        (["a!"], replace(LIMITS, max_context_length=3), Status.LENGTH_LIMIT),  # of the prompt: no turn
    ],
)
def test_an_episode_that_a_limit_ends_is_closed(byte_tokenizer: Any, lines: Any, limits: Any, status: Status) -> None:
    scene = Scene(byte_tokenizer, limits=limits)
    assert asyncio.run(scene.play(*lines)).status is status
    assert scene.world.all_closed()


def test_what_an_episode_raises_ends_the_rollout_and_closes_it(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        async def away(episode: Count) -> Outcome:
            raise EnvironmentUnavailable("its process has died")

        scene = Scene(byte_tokenizer, Counting(away))
        failed = await scene.play("a!")
        assert (failed.status, failed.failure) == (Status.FAILED, "its process has died")
        assert scene.world.all_closed()

        async def bug(episode: Count) -> Outcome:
            raise KeyError("a bug")

        scene = Scene(byte_tokenizer, Counting(bug))
        with pytest.raises(KeyError):
            await scene.play("a!")
        assert scene.world.all_closed()

        async def cancels_itself(episode: Count) -> Outcome:
            raise asyncio.CancelledError

        scene = Scene(byte_tokenizer, Counting(cancels_itself))
        with pytest.raises(RolloutError, match="Count raised CancelledError, but nobody has cancelled it"):
            await scene.play("a!")
        assert scene.world.all_closed()

    asyncio.run(plot())


def test_an_error_of_the_sampler_closes_the_episode(byte_tokenizer: Any) -> None:
    scene = Scene(byte_tokenizer)
    with pytest.raises(IndexError):
        asyncio.run(scene.play())  # it has no line
    assert scene.world.all_closed()


def test_a_rollout_that_is_cancelled_ends_its_turn_and_closes_its_episode(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        playing = asyncio.create_task(scene.play("wait!"))
        while not scene.world.asked:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert scene.world.all_closed()

    asyncio.run(plot())


def test_a_close_that_fails_or_never_ends_is_one_warning_and_the_rollout_counts(
    byte_tokenizer: Any, caplog: Any
) -> None:
    async def fails() -> None:
        raise OSError("the folder is gone")

    async def never() -> None:
        await asyncio.Event().wait()

    class Other(Count):
        pass

    async def plot() -> None:
        scene = Scene(byte_tokenizer, Counting(close=fails))
        for _ in range(3):
            assert (await scene.play("say")).status is Status.ANSWERED
        assert scene.world.all_closed()

        class NeverCloses(Counting):
            async def open(self, prompt: Prompt) -> Episode:
                self.opened.append(Other(self))
                return self.opened[-1]

        scene = Scene(byte_tokenizer, NeverCloses(close=never), replace(LIMITS, step_timeout_s=0.05))
        assert (await scene.play("say")).status is Status.ANSWERED

    with caplog.at_level(logging.WARNING):
        asyncio.run(plot())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "Count raised OSError: the folder is gone" in warnings[0] and "Other raised TimeoutError" in warnings[1]


def test_an_environment_without_state_is_opened_and_asked_as_before(byte_tokenizer: Any) -> None:
    class Plain(Environment):
        async def step(self, prompt: Prompt, text: str, tools_allowed: bool) -> Outcome:
            return Outcome("answer", valid=True, done=True, event={"row": prompt.row, "tools": tools_allowed})

    async def plot() -> None:
        world = Plain()
        episode = await world.open(Prompt((1,), "t", {"x": 1}))
        assert (await episode.step("a", False)).event == {"row": {"x": 1}, "tools": False}
        await episode.close()
        assert (await Scene(byte_tokenizer, world).play("a")).status is Status.ANSWERED

    asyncio.run(plot())


def test_one_turn_of_an_environment_with_state_is_an_episode_of_its_own(byte_tokenizer: Any) -> None:
    world = Counting()
    assert [asyncio.run(world.step(Prompt((1,), "t", {}), "a", True)).reply for _ in range(2)] == ["[1]", "[1]"]
    assert len(world.opened) == 2 and world.all_closed()


# Pause and resume


def test_a_rollout_resumes_with_its_own_state_in_the_middle_of_a_turn(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        paused = await scene.play("a!", "b~")
        assert (paused.status, paused.open_turn, paused.num_turns) == (None, INTERRUPTED, 2)
        [episode] = scene.world.opened
        assert episode.closed == 0
        ended = await scene.play("c!", "say", begun=paused)
        assert scene.text(ended) == "question: a![1]bc![2]say"
        assert scene.world.opened == [episode] and scene.world.all_closed() and ended.episode_key is None

    asyncio.run(plot())


def test_an_answer_that_was_pending_is_given_to_the_rollout_that_resumes(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        pause = Pause(scene.answers)
        playing = [asyncio.create_task(scene.play("wait!", pause=pause)) for _ in range(3)]
        while scene.world.asked < 3:
            await asyncio.sleep(0)
        pause.begin()
        paused = await asyncio.gather(*playing)
        assert len({one.episode_key for one in paused}) == 3, "the three are equal in everything else"
        scene.world.may_answer.set()
        ended = await asyncio.gather(*(scene.play("say", begun=one) for one in paused))
        assert {scene.text(one) for one in ended} == {"question: wait![1]say"}
        assert scene.world.asked == len(scene.world.opened) == 3 and scene.world.all_closed()

    asyncio.run(plot())


def test_a_rollout_whose_state_is_elsewhere_begins_again_from_its_prompt(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene, other = Scene(byte_tokenizer), Scene(byte_tokenizer)
        paused = await scene.play("a!", "b~")
        ended = await other.play("x!", "say", begun=paused)
        assert other.text(ended) == "question: x![1]say"
        assert (ended.num_turns, ended.num_valid_actions, len(ended.events)) == (2, 2, 2)
        assert other.world.all_closed() and [one.closed for one in scene.world.opened] == [0]

    asyncio.run(plot())


def test_a_state_is_taken_once_and_no_record_goes_on_with_one_that_is_ahead_of_it(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        paused = await scene.play("a!", "b~")
        old = replace(paused, segments=list(paused.segments), events=list(paused.events))
        again = await scene.play("c!", "d~", begun=paused)
        assert again.num_turns == 3
        ended = await scene.play("x!", "say", begun=old)
        assert scene.text(ended) == "question: x![1]say", "its state had gone on without it"
        assert len(scene.world.opened) == 2

    asyncio.run(plot())


def test_states_that_nobody_comes_for_are_closed_at_the_second_interruption_or_when_all_is_forgotten(
    byte_tokenizer: Any,
) -> None:
    async def plot() -> None:
        scene = Scene(byte_tokenizer)
        paused = [await scene.play("a!", "b~") for _ in range(3)]
        await settle()
        assert [one.closed for one in scene.world.opened] == [1, 0, 0]
        scene.answers.forget()
        await scene.answers.closed()
        assert scene.world.all_closed()
        ended = await scene.play("say", begun=paused[2])
        assert scene.text(ended) == "question: say" and scene.world.all_closed()

    asyncio.run(plot())


def test_a_pending_turn_is_cancelled_before_its_state_is_closed(byte_tokenizer: Any) -> None:
    async def plot() -> None:
        ended: list[str] = []

        async def slow(episode: Count) -> Outcome:
            try:
                await asyncio.Event().wait()
            finally:
                await settle()
                assert not episode.closed
                ended.append("turn")
            raise AssertionError

        scene = Scene(byte_tokenizer, Counting(slow))
        pause = Pause(scene.answers)
        playing = asyncio.create_task(scene.play("a!", pause=pause))
        while not (scene.world.opened and scene.world.opened[0].turns):
            await asyncio.sleep(0)
        pause.begin()
        await playing
        scene.answers.forget()
        await scene.answers.closed()
        assert ended == ["turn"] and scene.world.all_closed()

    asyncio.run(plot())


def test_an_interruption_while_an_episode_is_opened_leaves_nothing(byte_tokenizer: Any) -> None:
    class Opening(Counting):
        async def open(self, prompt: Prompt) -> Episode:
            self.asked += 1
            await self.may_answer.wait()
            return await super().open(prompt)

    async def plot() -> None:
        scene = Scene(byte_tokenizer, Opening())
        pause = Pause(scene.answers)
        playing = asyncio.create_task(scene.play("a!", pause=pause))
        while not scene.world.asked:
            await asyncio.sleep(0)
        pause.begin()
        paused = await playing
        assert (paused.num_turns, paused.episode_key, scene.world.opened) == (0, None, [])

    asyncio.run(plot())
