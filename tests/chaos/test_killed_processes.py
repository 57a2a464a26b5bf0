"""SIGKILL to each kind of process in the middle of a step: what the run does, how fast, and what is lost."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_world import metrics_by_step
from killed_runs import ROLLOUT, UPDATE, KilledRun, assert_same_runs, settings_of
from training_process import the_error

from verl.trainer import saved_state

pytestmark = pytest.mark.slow
STEPS = 3


@pytest.fixture(scope="module")
def make_run(
    tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., KilledRun]:
    """A run of three steps with these overrides, in a folder of its own."""

    def make(*overrides: str, workers: int = 1) -> KilledRun:
        settings = settings_of(tinywiki, policy, tinywiki_url, STEPS, workers)
        return KilledRun(tmp_path_factory.mktemp("killed") / "run", settings + overrides)

    return make


@pytest.fixture(scope="module")
def straight(make_run: Callable[..., KilledRun]) -> KilledRun:
    run = make_run()
    run.finish()
    return run


@pytest.mark.parametrize("victim", ["EngineCore", ROLLOUT], ids=["engine", "agent_worker"])
def test_engines_come_back_and_the_run_ends_as_if_nothing_had_happened(
    victim: str, make_run: Callable[..., KilledRun], straight: KilledRun
) -> None:
    run = make_run()
    running = run.start()
    (worker,) = run.stop_in(ROLLOUT, after_step=1)
    (process,) = running.processes(victim)
    process.kill()
    if process != worker:
        worker.resume()
    assert running.end() == 0, running.said[-6000:]
    assert running.said.count("The engine is restarted") == 1
    assert_same_runs(straight, run, STEPS)
    more = max(metrics_by_step(run.folder)[step]["timing_s/gen"] for step in range(1, STEPS + 1))
    print(f"{victim}: its rollout took {more:.1f} s, one without the fault {gen_seconds(straight):.1f} s")


def gen_seconds(run: KilledRun) -> float:
    return statistics.median(row["timing_s/gen"] for row in metrics_by_step(run.folder).values())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dead_actor_worker_ends_the_run_which_can_go_on(
    workers: int, make_run: Callable[..., KilledRun], straight: KilledRun
) -> None:
    run = make_run(workers=workers)
    run.start()
    *others, victim = run.stop_in(UPDATE, after_step=1)
    victim.kill()
    for worker in others:
        worker.resume()
    seconds = assert_ends(run, "ActorWorker.update: a worker process ended")
    print(f"actor worker, 1 of {workers}: ended after {seconds:.1f} s")
    run.finish()
    if workers == 1:
        assert_same_runs(straight, run, STEPS)


@pytest.mark.parametrize("victim", ["ActorWorker", "CriticWorker"])
def test_a_dead_worker_beside_another_role_s_ends_the_run(
    victim: str, make_run: Callable[..., KilledRun], policy: Path
) -> None:
    """A critic on its own updates beside the actor: both are stopped there, one dies, the other is not waited for."""
    ppo = ("algorithm.adv_estimator=gae", f"critic.model.path={policy}", "critic.n_gpus_per_node=1")
    run = make_run(*ppo, "actor_rollout_ref.actor.ppo_epochs=4", workers=2)  # of both roles: long enough to be met
    run.start()
    found = {"CriticWorker": run.stop_in("ray::CriticWorker.update", after_step=1)}
    found["ActorWorker"] = run.stop_in(UPDATE, after_step=1)
    [process] = found[victim]
    process.kill()
    seconds = assert_ends(run, f"{victim}.update: a worker process ended")
    print(f"{victim}, beside another role's: ended after {seconds:.1f} s")
    run.finish()
    assert sorted(metrics_by_step(run.folder)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("victim", ["gcs_server", "raylet/raylet"])
def test_a_dead_part_of_ray_ends_the_run(victim: str, make_run: Callable[..., KilledRun]) -> None:
    """Ray's library ends the driver, which has no time to say anything: the janitor names the state."""
    run = make_run("trainer.total_training_steps=100")  # three may be over before it is noticed
    run.start()
    run.wait_until(ROLLOUT, after_step=1)
    run.running.processes(victim)[0].kill()
    print(f"{victim}: ended after {assert_ends(run, None):.1f} s")


def test_a_worker_that_hangs_is_an_error_after_its_deadline_with_everyones_stacks(
    make_run: Callable[..., KilledRun],
) -> None:
    """Stopped, not killed: nothing but its silence tells."""
    deadline_s = 90
    run = make_run(f"trainer.step_timeout_s={deadline_s}")
    run.start()
    run.stop_in(UPDATE, after_step=1)
    seconds = assert_ends(run, f"ActorWorker.update: no answer within {deadline_s} s", deadline_s)
    print(f"hanging actor worker: ended {seconds - deadline_s:.1f} s after the deadline")
    stacks = {path.name: path.read_text() for path in (run.folder / "stacks").iterdir()}
    assert any("in fit" in text and "in last_words" in text for text in stacks.values())  # the driver's
    assert any("EngineCore" in name for name in stacks) and any("RolloutWorker" in name for name in stacks)


def test_a_dead_retrieval_server_ends_the_run(
    make_run: Callable[..., KilledRun], tinywiki: Path, start_retriever: Callable[..., str]
) -> None:
    url = start_retriever(tinywiki / "corpus.jsonl")
    deadline_s = 8
    run = make_run(f"retriever.url={url}", "retriever.timeout_s=2", f"retriever.deadline_s={deadline_s}")
    run.start()
    run.wait_until(ROLLOUT, after_step=1)
    port = int(url.split(":")[2].split("/")[0])
    listening = {c.pid for c in psutil.net_connections("inet") if c.laddr.port == port and c.status == "LISTEN"}
    assert listening
    for pid in listening:
        os.kill(pid, signal.SIGKILL)
    seconds = assert_ends(run, "is not available", 3 * deadline_s)
    print(f"retrieval server: ended after {seconds:.1f} s")


def test_a_dead_driver_leaves_nothing_behind(make_run: Callable[..., KilledRun]) -> None:
    run = make_run()
    run.start()
    run.wait_until(ROLLOUT, after_step=1)
    open_files = psutil.Process(run.running.process.pid).open_files()
    (lock,) = [Path(file.path) for file in open_files if file.path.startswith("/dev/shm/verl-weights-")]
    print(f"driver: the last process ended after {run.kill_driver():.1f} s")
    saved_state.verify(run.state(1))
    assert f"the run resumes from {run.state(1)}" in run.running.said
    run.finish()
    assert not lock.parent.exists()  # the next run takes away what was left in memory


def assert_ends(run: KilledRun, message: str | None, deadline_s: float = 0.0) -> float:
    """It ends with status 1 within 60 s beyond the deadline, leaves no process and an intact state, and names that.

    Unless `message` is None it says why, too. Returns the seconds that it took.
    """
    running, start = run.running, time.monotonic()
    status = running.process.wait(timeout=deadline_s + 60)
    seconds = time.monotonic() - start
    assert status == 1, running.said[-6000:]
    if message is not None:
        assert message in the_error(running.said)
    running.end(others_s=max(0.0, deadline_s + 60 - seconds))
    state = list(saved_state.saved(run.folder))[-1]
    saved_state.verify(state)
    assert f"with trainer.resume_mode=auto the run resumes from {state}" in running.said
    return seconds
