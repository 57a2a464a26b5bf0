"""What a run asks of its program before it starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.helpers.programs import ASKED, Play, Stage, ask, two_turns
from verl.agent.environment import environment_class
from verl.agent.program import ProgramEnvironment
from verl.agent.program_kinds import ProgramTask
from verl.config import load_config
from verl.errors import DataError
from verl.protocol import Status


def test_a_run_keeps_how_its_retriever_was_started_as_without_a_program() -> None:
    plain, run = load_config("tinywiki_chat"), load_config("tinywiki_chat", ["agent.program=example.openai_agent.play"])
    files = environment_class(run).files(run)
    assert environment_class(run) is ProgramEnvironment
    assert files and files == environment_class(plain).files(plain)


def test_the_trial_plays_an_episode_and_says_what_is_wrong_with_the_program() -> None:
    async def trial(program: Play) -> Any:
        stage = Stage("trimming", program)
        try:
            return await stage.environment.step(stage.prompt, stage.environment.example_turn, False)
        finally:
            await stage.environment.close()

    async def crash(task: ProgramTask) -> None:
        await ask(task, ASKED)
        raise RuntimeError("the shelf fell over")

    outcome = asyncio.run(trial(two_turns([])))
    assert (outcome.action, outcome.done, outcome.status) == ("answer", True, Status.ANSWERED)
    with pytest.raises(Exception, match="the shelf fell over"):
        asyncio.run(trial(crash))


def test_a_prompt_with_a_role_that_nobody_knows_is_refused() -> None:
    """The chat template would leave the question out."""
    with pytest.raises(DataError, match=r"messages\[0\] has the role 'human'"):
        Stage("trimming", two_turns([])).environment.prompt_ids([{"role": "human", "content": "Who?"}])
