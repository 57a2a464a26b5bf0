"""Episodes of programs that an update interrupts, and that go on behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from search_r1.llm_agent.transcript import final_answer, read_turns
from tests.helpers.chat_episodes import says
from tests.helpers.programs import Heard, Stage, two_turns
from verl.agent.environment import INTERRUPTED, Generation, Sampling
from verl.agent.pause import OpenAnswers, Pause
from verl.agent.text import decode_ids
from verl.protocol import Status, Trajectory


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


async def interrupted(answers: OpenAnswers, begun: list[int]) -> tuple[Stage, Cut, Trajectory]:
    """An episode that was paused within the first of two turns. `begun` counts how often its program is started."""
    stage, pause = Stage("trimming", two_turns(begun)), Pause(answers)
    cut = Cut(stage.script([says("first"), says("second")]).sampler)
    playing = asyncio.create_task(stage.episode(cut, pause=pause))
    while not cut.contexts:
        await asyncio.sleep(0.01)
    pause.begin()
    await asyncio.sleep(0.05)
    assert not playing.done(), "it waits for the turn that the engine is about to cut"
    cut.cuts.set()
    return stage, cut, await playing


def test_a_turn_that_an_interruption_cut_goes_on_where_it_ended_and_the_program_never_knows() -> None:
    async def scene() -> None:
        answers, begun = OpenAnswers(), list[int]()
        stage, cut, paused = await interrupted(answers, begun)
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
        stage, cut, paused = await interrupted(answers, begun)
        answers.forget()
        await answers.closed()
        assert not stage.environment.sessions._open, "its session is closed"
        played = await stage.episode(cut, begun=paused, pause=Pause(OpenAnswers()))
        await stage.environment.close()
        assert (played.status, begun) == (Status.ANSWERED, [1, 1])
        assert decode_ids(stage.tokenizer, played.segments[1].ids) == "first<|im_end|>"

    asyncio.run(scene())
