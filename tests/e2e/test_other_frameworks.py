"""Other people's frameworks, in environments of their own that scripts make: verifiers and OpenEnv."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_episodes import says
from e2e_world import ENV, ROOT, free_port, metrics_by_step, run_here, wait_until_up
from programs import Stage
from transformers import AutoTokenizer

from example import openai_agent
from example.openenv import program
from search_r1.rewards.exact_match import ExactMatchReward
from search_r1.rewards.program import ProgramReward
from tests.e2e.test_chat_run import RESULTS, call, run_with
from verl.protocol import Status
from verl.tracking.trajectory_store import load_trajectories, trajectories_path
from verl.trainer.sampling.scoring import score_trajectories

pytestmark = pytest.mark.slow


def made_by(script: str, folder: Path) -> Path:
    subprocess.run(["bash", script, str(folder)], cwd=ROOT, check=True, timeout=1200, env=ENV)
    return folder


def test_an_environment_of_verifiers_trains_and_rewards_as_this_framework_does(
    ray_session: object, tmp_path: Path
) -> None:
    """Three steps; each reward that verifiers gave is exact match here, too."""
    venv = made_by("example/verifiers/setup.sh", tmp_path / "verifiers")
    first = {"role": "assistant", "content": "", "tool_calls": [call("calculator", expression="2 + 3")]}
    command = run_with([], first, RESULTS[:1], tmp_path, schemas=openai_agent.TOOLS)
    rewarded = ("agent.program_serves=true", "reward.function=search_r1.rewards.program.ProgramReward")
    program = f"agent.program='{venv}/bin/python example/verifiers/tinywiki.py'"
    assert run_here(*command, program, *rewarded) == 0
    rewards, tokenizer = list[float | None](), AutoTokenizer.from_pretrained(tmp_path / "policy")
    for step in (1, 2, 3):
        assert metrics_by_step(tmp_path / "run")[step]["env/failed_ratio"] == 0
        rollouts = load_trajectories(trajectories_path(tmp_path / "run", "train", step))
        given = [one.reward for one in rollouts]
        assert [one.reward for one in score_trajectories(ExactMatchReward(), rollouts, tokenizer)] == given
        rewards += given
    assert len(rewards) == 48 and 20 < sum(filter(None, rewards)) <= 48


@pytest.fixture
def echo_url(tmp_path: Path) -> Iterator[str]:
    """The address of the environment that `openenv init` makes."""
    venv, port = made_by("example/openenv/setup.sh", tmp_path / "openenv"), free_port()
    server = subprocess.Popen(
        [venv / "bin/python", "-m", "uvicorn", "server.app:app", "--port", str(port)], cwd=venv / "echo_env"
    )
    try:
        wait_until_up(server, f"http://127.0.0.1:{port}/health")
        yield f"ws://127.0.0.1:{port}/ws"
    finally:
        server.terminate()
        server.wait(30)


def test_an_environment_of_openenv_is_played(echo_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rollouts at once, of which the server has place for one at a time; it rewards the length, up to 1."""
    monkeypatch.setenv("OPENENV_URL", echo_url)
    stage = Stage("trimming", program.play)

    async def scene() -> list[Any]:
        turns = [says(text) for text in ("a", "hello", "a longer message")]
        try:
            return list(await asyncio.gather(*(stage.episode(stage.script(turns)) for _ in range(4))))
        finally:
            await stage.environment.close()

    for rollout in score_trajectories(ProgramReward(), asyncio.run(scene()), stage.tokenizer):
        assert (rollout.status, rollout.num_turns) == (Status.ANSWERED, 3)
        assert rollout.turn_rewards == pytest.approx((0.1, 0.5, 1.0)), json.dumps(rollout.events)
