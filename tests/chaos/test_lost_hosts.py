"""The network of a host fails in each phase of a step, for some seconds or for good."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import QUICK_TO_GIVE_UP, Host, Network, ray_cluster, ray_node
from phases import EXPORT, ROLLOUT, SAMPLER, SAVE, TRAINER, UPDATE, Phase, standing_still, stop_in, title_of
from runs_on_hosts import SETTINGS, STEPS, HostRun, OneHost, assert_same, retriever_on
from training_process import the_error

from verl.run import saved_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
DOWN_S = 5.0
GONE_S = 120.0  # with `QUICK_TO_GIVE_UP` Ray notices a lost node after some 15 s, on idle cores
WORKERS = (SAMPLER, TRAINER, "EngineCore")
PHASES = (ROLLOUT, UPDATE, EXPORT, SAVE)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(1, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture(scope="module")
def start(network: Network, tinywiki: Path, policy: Path) -> Iterator[Callable[..., HostRun]]:
    """A run in a folder, with an engine on each of its hosts, led from the first one."""
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:

        def begin(folder: Path, address: str, *layout: str) -> HostRun:
            settings = (*SETTINGS, "actor_rollout_ref.rollout.num_engines=2", "trainer.nnodes=2", *layout)
            return HostRun(network.hosts[0], folder, small_run(tinywiki, policy, url, folder, *settings), address)

        yield begin


@contextlib.contextmanager
def stopped_in(phase: Phase, run: HostRun, host: Host, after_step: int) -> Iterator[None]:
    """The workers on `host` that are in the phase stand still meanwhile."""
    run.wait_until(saved_state.state_path(run.folder, after_step).is_dir)
    with standing_still(stop_in(phase, run, lambda: host.processes("ray::"))):
        yield


def test_a_network_that_fails_for_seconds_costs_the_time_alone(
    network: Network, start: Callable[..., HostRun], one_host: OneHost, tmp_path: Path
) -> None:
    first, other = network.hosts[0], network.add()
    with ray_cluster([first, other]) as address:
        run = start(tmp_path / "run", address)
        for step, phase in enumerate(PHASES, start=1):
            with stopped_in(phase, run, other, after_step=step):
                network.cut(other)
            time.sleep(DOWN_S)
            network.mend(other)
        run.finish()
    assert_same(one_host.run_with(2), run.folder)


def test_a_run_whose_host_is_cut_off_ends_and_goes_on(
    network: Network, start: Callable[..., HostRun], one_host: OneHost, tmp_path: Path
) -> None:
    """From the newest state, each time with another host, which gives the same bits; at last with the one that is
    left.
    """
    first, folder = network.hosts[0], tmp_path / "run"
    address = f"{first.address}:6379"
    with ray_node(first, address, **QUICK_TO_GIVE_UP):
        for step, phase in enumerate(PHASES, start=1):
            other = network.add()
            with ray_node(other, address, **QUICK_TO_GIVE_UP):
                run = start(folder, address)
                with stopped_in(phase, run, other, after_step=step):
                    assert all(host.processes(part) for host in (first, other) for part in WORKERS)
                    network.cut(other)
                cut_at = time.monotonic()
                assert run.process.wait(timeout=GONE_S) == 1, run.said[-6000:]
                print(f"{phase}: ended after {time.monotonic() - cut_at:.1f} s: {the_error(run.said)}")
                state = list(saved_state.saved(folder))[-1]
                saved_state.verify(state)
                assert f"with trainer.resume_mode=auto the run resumes from {state}" in run.said
                wait_until_no_worker_is_left(first, cut_at)
                wait_until_no_worker_is_left(other, cut_at)
                print(f"no worker is left after {time.monotonic() - cut_at:.1f} s")
        kept = saved_state.step_of(state)
        assert kept >= len(PHASES)
        assert_same(one_host.run_with(2), folder, kept)
        alone = start(folder, address, "trainer.min_nnodes=1")
        alone.finish()
    assert "training on 1 (trainer.min_nnodes=1)" in alone.said
    assert sorted(metrics_by_step(folder)) == list(range(1, STEPS + 1))


def wait_until_no_worker_is_left(host: Host, since: float) -> None:
    """Neither a trainer nor an engine."""
    while left := [process for part in WORKERS for process in host.processes(part)]:
        assert time.monotonic() - since < 2 * GONE_S, [title_of(process) for process in left]
        time.sleep(0.1)
