"""SIGKILL to each kind of process in the middle of a step: what the run does, how fast, and what is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from e2e_world import metrics_by_step
from killed_runs import EMA_PG, KilledRun, Runs, assert_same_runs
from phases import CRITIC_UPDATE, ROLLOUT, UPDATE, kill, standing_still, title_of
from training_process import the_error

from verl.run import saved_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """Each test goes on with it where the one before has left it; the last one looks at what has become of it."""
    return runs.make(tmp_path_factory.mktemp("killed") / "run", EMA_PG)


def test_a_dead_actor_worker_ends_the_run(run: KilledRun) -> None:
    run.start()
    assert_ends(run, death_in(run.kill_in(UPDATE, after_step=1)))


def test_a_worker_that_hangs_is_an_error_after_its_deadline_with_everyones_stacks(run: KilledRun) -> None:
    """Stopped, not killed: nothing but its silence tells."""
    deadline_s = 90  # an engine has to start within it, too
    run.start(f"trainer.step_timeout_s={deadline_s}")
    [worker] = run.stop_in(UPDATE, after_step=1)
    phase = call_of(title_of(worker))
    assert_ends(run, f"{phase}: no answer within {deadline_s} s", deadline_s)
    stacks = {path.name: path.read_text() for path in (run.folder / "stacks").iterdir()}
    assert any("in fit" in text and "in finish_writing_on_failure" in text for text in stacks.values())  # the driver's
    assert any("EngineCore" in name for name in stacks) and any("RolloutWorker" in name for name in stacks)


def test_a_dead_retrieval_server_ends_the_run(
    run: KilledRun, tinywiki: Path, start_retriever: Callable[..., str]
) -> None:
    url = start_retriever(tinywiki / "corpus.jsonl")
    deadline_s = 8
    run.start(f"retriever.url={url}", "retriever.timeout_s=2", f"retriever.deadline_s={deadline_s}")
    with standing_still(run.stop_in(ROLLOUT, after_step=1)):
        port = int(url.split(":")[2].split("/")[0])
        listening = {c.pid for c in psutil.net_connections("inet") if c.laddr.port == port and c.status == "LISTEN"}
        assert listening
        for pid in listening:
            kill(psutil.Process(pid))
    assert_ends(run, "is not available", 3 * deadline_s)


def test_after_a_dead_driver_and_dead_engines_a_run_ends_as_if_nothing_had_happened(run: KilledRun, runs: Runs) -> None:
    """The first leaves nothing behind but a state; for the others the run does not even end."""
    run.start()
    with standing_still(run.stop_in(ROLLOUT, after_step=1)):
        driver = psutil.Process(run.running.process.pid)
        (lock,) = [Path(file.path) for file in driver.open_files() if file.path.startswith("/dev/shm/verl-weights-")]
        kill(driver)
    run.running.end(others_s=60)
    state = run.newest_state()

    running = run.start()
    run.kill_in(ROLLOUT, saved_state.step_of(state), "EngineCore")
    run.kill_in(ROLLOUT, saved_state.step_of(state) + 1)
    assert running.end() == 0, running.said[-6000:]
    assert running.said.count("The engine is restarted") == 2
    assert_same_runs(runs.straight(EMA_PG), run)
    assert not lock.parent.exists()  # the next run takes away what was left in memory


def test_of_two_actor_workers_one_dies(runs: Runs, tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", EMA_PG, "trainer.n_gpus_per_node=2")
    run.start()
    with standing_still(run.stop_in(UPDATE, after_step=1, number=2)) as workers:
        victim = title_of(workers[1])
        kill(workers[1])
    assert_ends(run, death_in(victim))


def test_a_dead_worker_beside_another_role_s_ends_the_run(runs: Runs, policy: Path, tmp_path: Path) -> None:
    """A critic on its own updates beside the actor: both are stopped there, one dies, the other is not waited for."""
    ppo = ("algorithm.adv_estimator=gae", f"critic.model.path={policy}", "critic.n_gpus_per_node=1")
    sizes = ("trainer.n_gpus_per_node=2", "trainer.total_training_steps=3")
    longer = "actor_rollout_ref.actor.ppo_epochs=4"  # of both roles: long enough for both to be met
    run = runs.make(tmp_path / "run", EMA_PG, *ppo, *sizes, longer)
    for phase in (CRITIC_UPDATE, UPDATE):
        run.start()
        found = run.stop_in(CRITIC_UPDATE + UPDATE, after_step=1, number=2)
        [victim] = [worker for worker in found if title_of(worker) in phase]
        died = title_of(victim)
        kill(victim)  # the other one is still stopped
        assert_ends(run, death_in(died))
    run.finish()
    assert sorted(metrics_by_step(run.folder)) == [1, 2, 3]


@pytest.fixture(scope="module")
def long_run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """Some steps may be over before the death of a part of Ray is noticed."""
    return runs.make(tmp_path_factory.mktemp("long") / "run", EMA_PG, "trainer.total_training_steps=100")


@pytest.mark.parametrize("victim", ["gcs_server", "raylet/raylet"])
def test_a_dead_part_of_ray_ends_the_run(victim: str, long_run: KilledRun) -> None:
    """Ray's library ends the driver, which has no time to say anything: the cleanup names the state."""
    long_run.start()
    long_run.kill_in(ROLLOUT, after_step=1, victim=victim)
    assert_ends(long_run, None)


def call_of(title: str) -> str:
    return title.removeprefix("ray::")


def death_in(title: str) -> str:
    return f"{call_of(title)}: a worker process ended"


def assert_ends(run: KilledRun, message: str | None, deadline_s: float = 0.0) -> None:
    """It ends with status 1 within 60 s beyond the deadline, leaves no process and an intact state, and names that.

    Unless `message` is None it says why, too.
    """
    running, start = run.running, time.monotonic()
    status = running.process.wait(timeout=deadline_s + 60)
    seconds = time.monotonic() - start
    assert status == 1, running.said[-6000:]
    if message is not None:
        assert message in the_error(running.said)
    running.end(others_s=max(0.0, deadline_s + 60 - seconds))
    run.newest_state()
