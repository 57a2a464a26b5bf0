"""A whole run of two steps behind the proxy: with a tenth of all requests disturbed, and with a server that dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos_world import assert_no_error_text
from e2e_world import ENV, ROOT, metrics_by_step, run, small_run
from fault_proxy import FINAL, PASSING, FaultProxy, Kind, Request, seeded
from transformers import AutoTokenizer

from search_r1.llm_agent.environment import SearchEnvironment
from verl.agent.text import encode_text
from verl.config import load_config
from verl.protocol import Source, Status, Trajectory
from verl.run import saved_state
from verl.tracking.trajectory_store import load_trajectories

NUM_TRAJECTORIES = 24
TIMES = ("retriever.timeout_s=2", "retriever.deadline_s=8", "retriever.max_batch=1")
STEPS = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "+trainer.val_before_train=false",
    "trainer.logger=[]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def stored(folder: Path, step: int) -> Path:
    return folder / "trajectories" / f"train_step_{step}.parquet"


def test_a_tenth_of_all_requests_disturbed(tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path) -> None:
    """The run finishes. Every request is one query, so each answer that is none fails at least one attempt."""
    disturb = seeded(0.1, seed=5)

    def rule(request: Request) -> Kind:
        if request.queries == ("health check",) or stored(tmp_path, 2).exists():  # what follows is validation
            return "none"
        return "garbage" if request.number == 5 else disturb(request)

    with FaultProxy(tinywiki_url, rule) as proxy:
        limits = ("agent.max_failed_ratio=0.6", "data.val_data_num=4")
        started = time.monotonic()
        run(*small_run(tinywiki, policy, proxy.url, tmp_path, *TIMES, *STEPS, *limits))
    metrics, tokenizer = metrics_by_step(tmp_path), AutoTokenizer.from_pretrained(policy)
    print(f"{time.monotonic() - started:.0f} s; {[(kind, proxy.count(kind)) for kind in PASSING + FINAL]}")
    assert proxy.count(*PASSING) > 0
    failures = 0.0
    for step in (1, 2):
        trajectories, redraws = load_trajectories(stored(tmp_path, step)), metrics[step]["env/redraws"]
        assert len(trajectories) == NUM_TRAJECTORIES
        failed = [trajectory for trajectory in trajectories if trajectory.status is Status.FAILED]
        attempts = NUM_TRAJECTORIES + redraws
        # each failure was drawn again, or is stored
        assert metrics[step]["env/failed_ratio"] == pytest.approx((redraws + len(failed)) / attempts)
        failures += redraws + len(failed)
        trained = sum(t.num_policy_tokens for t in trajectories if t.status is not Status.FAILED)
        assert metrics[step]["state_tokens/total"] == trained
        assert_as_without_faults(trajectories, tokenizer, small_run(tinywiki, policy, tinywiki_url, tmp_path))
    assert 1 <= proxy.count(*FINAL) <= failures
    assert metrics[2]["val/failed_ratio"] == 0


def assert_as_without_faults(trajectories: list[Trajectory], tokenizer: Any, command: Sequence[str]) -> None:
    """No error text, and each observation is, token by token, what the environment of `command` answers."""
    environment = SearchEnvironment.from_config(load_config("tinywiki", list(command[4:])), tokenizer)

    async def answers() -> None:
        for trajectory in trajectories:
            assert_no_error_text(trajectory, tokenizer)
            assert (trajectory.failure is not None) == (trajectory.status is Status.FAILED)
            observations = [s.ids for s in trajectory.segments if s.source is Source.ENVIRONMENT]
            for ids, event in zip(observations, trajectory.events, strict=False):  # the last turn has no answer
                outcome = await environment.step(trajectory.prompt, event["text"], True)
                assert encode_text(tokenizer, outcome.reply) == ids
        await environment.close()

    assert any(t.num_searches for t in trajectories)
    asyncio.run(answers())


def test_a_server_that_dies_in_the_middle_of_a_step(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path: Path
) -> None:
    """Step 1 is saved. In step 2 the server dies at the third search: the run ends, and can go on from step 1."""
    requests_of_step_2: list[Request] = []

    def rule(request: Request) -> Kind:
        if stored(tmp_path, 1).exists():
            requests_of_step_2.append(request)
        if len(requests_of_step_2) == 3:
            proxy.die()
        return "none"

    with FaultProxy(tinywiki_url, rule) as proxy:
        command = small_run(tinywiki, policy, proxy.url, tmp_path, *TIMES, *STEPS)
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        _, errors = process.communicate(timeout=300)
        assert proxy.died_at is not None
        ended_s = time.monotonic() - proxy.died_at
        print(f"ended {ended_s:.1f} s after the death\n{errors[-1500:]}")
    assert process.returncode == 1, errors[-4000:]
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "step 2: " in line and "agent.max_failed_ratio" in line
    assert f"retriever {proxy.url} is not available" in line and "bash retrieval_launch.sh" in line
    # at most three attempts (agent.max_redraws=2), each with one search that waits for its deadline of 8 s
    assert ended_s < 3 * 8 + 30
    state = saved_state.state_path(tmp_path, 1)
    saved_state.verify(state)
    assert f"with trainer.resume_mode=auto the run resumes from {state}" in errors
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["global_step_1"]
    assert sorted(metrics_by_step(tmp_path)) == [1] and not stored(tmp_path, 2).exists()
    assert [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])] == []
    resumed = ("trainer.resume_mode=auto", "data.val_data_num=4")
    run(*small_run(tinywiki, policy, tinywiki_url, tmp_path, *STEPS, *resumed))
    assert sorted(metrics_by_step(tmp_path)) == [1, 2]
