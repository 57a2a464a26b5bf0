"""Hosts that only sample, beside one that trains: the same numbers as on one host, also when one of them is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import QUICK_TO_GIVE_UP, Network, ray_node
from phases import SAMPLER, START, TRAINER, UPDATE, standing_still, stop_in, title_of
from runs_on_hosts import PYTHON, SETTINGS, HostRun, OneHost, assert_same, retriever_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DOWN_S = 5.0
STEPS = 14  # those in which a host is missed take longer on a busy machine
TIMES = (f"trainer.total_training_steps={STEPS}",)
NODES = ("trainer.layout=split", "actor_rollout_ref.rollout.nnodes=2", "actor_rollout_ref.rollout.num_engines=2")
BETWEEN_NODES = "actor_rollout_ref.rollout.weight_sync.between_nodes"
JOIN = "from verl.single_controller.cluster import connect; connect(worker_logs=False)"


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(3, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture
def start(network: Network, tinywiki: Path, policy: Path, tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    """A run led from the first host."""
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:

        def begin(address: str, *overrides: str) -> HostRun:
            command = small_run(tinywiki, policy, url, tmp_path / "run", *SETTINGS, *TIMES, *NODES, *overrides)
            return HostRun(network.hosts[0], tmp_path / "run", command, address)

        yield begin


def engines_of(run: HostRun) -> list[float]:
    """How many there were in each step."""
    return [row["rollout/num_engines"] for step, row in sorted(metrics_by_step(run.folder).items()) if step]


def test_a_host_is_cut_off(network: Network, start: Callable[..., HostRun], one_host: OneHost) -> None:
    """For seconds, which cost the time alone, and then for good: its processes live on, and nobody hears of them."""
    address = f"{network.hosts[0].address}:6379"
    with contextlib.ExitStack() as nodes:
        for host in network.hosts:
            nodes.enter_context(ray_node(host, address, **QUICK_TO_GIVE_UP))
        run = start(address)
        run.wait_for_step(1)
        network.cut(network.hosts[2])
        time.sleep(DOWN_S)
        network.mend(network.hosts[2])
        run.wait_for_step(3)
        network.cut(network.hosts[2])
        run.wait_until(lambda: "node 10.77.0.3 is lost; 1 rollout engine left" in run.said)
        run.finish()
    engines = engines_of(run)
    assert engines[:3] == [2, 2, 2] and engines[-1] == 1, engines
    assert_same(one_host.run_with(1, *TIMES), run.folder, STEPS)


@pytest.mark.parametrize("way", ["objects", "broadcast"])
def test_a_host_is_lost_and_another_joins(
    network: Network, start: Callable[..., HostRun], one_host: OneHost, way: str
) -> None:
    """Every metric that is not a time, and every weight, to the last bit those of one undisturbed host.

    The trainer waits in an update for what happens meanwhile, which takes longer than many steps.
    """
    trainer = network.hosts[0]
    address = f"{trainer.address}:6379"

    def in_an_update() -> contextlib.AbstractContextManager[object]:
        return standing_still(stop_in(UPDATE, run, lambda: trainer.processes(TRAINER)))

    with contextlib.ExitStack() as others:
        for host in network.hosts[:2]:
            others.enter_context(ray_node(host, address, **QUICK_TO_GIVE_UP))
        with ray_node(network.hosts[2], address, **QUICK_TO_GIVE_UP):
            run = start(address, f"{BETWEEN_NODES}={way}")
            run.wait_for_step(2)
            network.hosts[2].power_off()
        run.wait_until(lambda: "node 10.77.0.3 is lost; 1 rollout engine left" in run.said)
        with contextlib.ExitStack() as joined:
            with in_an_update():
                new = network.add()
                joined.enter_context(ray_node(new, address, **QUICK_TO_GIVE_UP))
                # It returns when the cluster has the node.
                new.run(PYTHON, "-c", JOIN, RAY_ADDRESS=address, RAY_AUTH_MODE="token")
            run.wait_until(lambda: "node 10.77.0.4 has joined" in run.said)
            with in_an_update():
                run.wait_until(lambda: new.processes("EngineCore"))
                run.wait_until(lambda: not any(title_of(worker) in START for worker in new.processes(SAMPLER)))
            run.finish()
    engines = engines_of(run)
    assert engines[:2] == [2, 2] and 1 in engines and engines[-1] == 2, engines
    assert_same(one_host.run_with(1, *TIMES), run.folder, STEPS)
