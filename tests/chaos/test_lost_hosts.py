"""The network of a host fails in each phase of a step, for some seconds or for good, or the host is switched off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from e2e_world import small_run
from hosts import Host, Network, ray_cluster, ray_node
from runs_on_hosts import HostRun, assert_same, retriever_on
from training_process import the_error

from verl.trainer import saved_state

pytestmark = pytest.mark.slow  # seven runs on two hosts, one to two minutes each
STEPS = 6
DOWN_S = 5.0
GONE_S = 120.0  # Ray notices a lost node after 20 to 30 s, on busy cores
WORKERS = ("ray::RolloutWorker", "ray::ActorWorker", "EngineCore")
PHASES = {
    "rollout": "ray::RolloutWorker.play",
    "update": "ray::ActorWorker.update",
    "sync": "ray::ActorWorker.export_weights",
    "save": "ray::ActorWorker.save",
}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(1, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture(scope="module")
def make_run(
    network: Network, tinywiki: Path, policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., HostRun]]:
    """A run of `STEPS` steps that saves after each, led from the first host."""
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:

        def start(address: str, *layout: str, folder: Path | None = None) -> HostRun:
            folder = folder or tmp_path_factory.mktemp("run") / "run"
            times = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=-1")
            more = ("actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[]", "trainer.deterministic=true")
            resumed = ("trainer.resume_mode=auto", "+trainer.val_before_train=false")
            command = small_run(tinywiki, policy, url, folder, *times, *more, *resumed, *layout)
            return HostRun(network.hosts[0], folder, command, address)

        yield start


@pytest.fixture(scope="module")
def undisturbed(make_run: Callable[..., HostRun]) -> HostRun:
    """On one host with as many workers."""
    run = make_run("local", "trainer.n_gpus_per_node=2")
    run.finish()
    return run


@contextlib.contextmanager
def stopped_in(phase: str, run: HostRun, host: Host, after_step: int) -> Iterator[None]:
    """The workers on `host` that are in the phase stand still meanwhile."""
    run.wait_until(saved_state.state_path(run.folder, after_step).is_dir)
    workers = host.processes("ray::")
    found: list[psutil.Process] = []

    def caught() -> bool:
        found[:] = [worker for worker in workers if phase in title_of(worker)]
        for worker in found:
            worker.suspend()
        if found and all(phase in title_of(worker) for worker in found):
            return True
        for worker in found:  # it was faster
            worker.resume()
        return False

    run.wait_until(caught)
    try:
        yield
    finally:
        for worker in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()


def title_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def test_a_network_that_fails_for_seconds_costs_the_time_alone(
    network: Network, make_run: Callable[..., HostRun], undisturbed: HostRun
) -> None:
    first, other = network.hosts[0], network.add()
    with ray_cluster([first, other]) as address:
        run = make_run(address, "trainer.nnodes=2")
        for step, title in enumerate(PHASES.values(), start=1):
            with stopped_in(title, run, other, after_step=step):
                network.cut(other)
            time.sleep(DOWN_S)
            network.mend(other)
        run.finish()
    assert_same(undisturbed, run, STEPS)


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_whose_host_is_cut_off_ends_and_goes_on(
    phase: str, network: Network, make_run: Callable[..., HostRun], undisturbed: HostRun
) -> None:
    """From the newest state: with another host, which gives the same bits, or with the one that is left."""
    first, other = network.hosts[0], network.add()
    with ray_node(first, f"{first.address}:6379"):
        with ray_node(other, f"{first.address}:6379"):
            run = make_run(f"{first.address}:6379", "trainer.nnodes=2")
            with stopped_in(PHASES[phase], run, other, after_step=2):
                network.cut(other)
            cut_at = time.monotonic()
            status = run.process.wait(timeout=GONE_S)
            ended_s = time.monotonic() - cut_at
            assert status == 1, run.said[-6000:]
            told = the_error(run.said)
            state = list(saved_state.saved(run.folder))[-1]
            saved_state.verify(state)
            assert f"with trainer.resume_mode=auto the run resumes from {state}" in run.said
            wait_until_no_worker_is_left(first, cut_at)
            left_s = wait_until_no_worker_is_left(other, cut_at)
            print(
                f"{phase}: ended after {ended_s:.1f} s, {state.name}, workers of the lost host {left_s:.1f} s: {told}"
            )
        if phase in ("update", "save"):
            with ray_node(network.add(), f"{first.address}:6379"):
                more = make_run(f"{first.address}:6379", "trainer.nnodes=2", folder=run.folder)
                more.finish()
            assert_same(undisturbed, more, STEPS)
        elif phase == "sync":
            more = make_run(f"{first.address}:6379", "trainer.nnodes=2", "trainer.min_nnodes=1", folder=run.folder)
            more.finish()
            assert "training on 1 (trainer.min_nnodes=1)" in more.said
            assert sorted(more.metrics()) == list(range(1, STEPS + 1))


def wait_until_no_worker_is_left(host: Host, since: float) -> float:
    """Seconds from `since` until the host has no trainer and no engine; an assertion error when one stays."""
    while left := [process for title in WORKERS for process in host.processes(title)]:
        assert time.monotonic() - since < 2 * GONE_S, [title_of(process) for process in left]
        time.sleep(0.1)
    return time.monotonic() - since
