"""Hosts that only sample, beside one that trains: the same numbers as on one host, also when one of them is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import Network, ray_node
from runs_on_hosts import HostRun, assert_same, retriever_on

pytestmark = pytest.mark.slow  # each test is two runs, of up to forty steps, one to three minutes each
STEPS = 40  # an engine takes longer to start than some of them
FEW_STEPS = 6
DOWN_S = 5.0
NODES = ("trainer.layout=split", "actor_rollout_ref.rollout.nnodes=2")
BETWEEN_NODES = "actor_rollout_ref.rollout.weight_sync.between_nodes"


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(3, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture
def url(network: Network, tinywiki: Path) -> Iterator[str]:
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:
        yield url


Start = Callable[..., HostRun]


@pytest.fixture
def start(network: Network, url: str, tinywiki: Path, policy: Path, tmp_path: Path) -> Start:
    """A run of so many steps by its name, led from the first host."""

    def begin(name: str, ray_address: str, steps: int, *layout: str) -> HostRun:
        settings = (f"trainer.total_training_steps={steps}", "trainer.test_freq=-1", "trainer.deterministic=true")
        more = (*settings, "actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[]", *layout)
        command = small_run(tinywiki, policy, url, tmp_path / name, *more)
        return HostRun(network.hosts[0], tmp_path / name, command, ray_address)

    return begin


def test_a_host_is_cut_off(network: Network, start: Start) -> None:
    """For seconds, which cost the time alone, and then for good: its processes live on, and nobody hears of them."""
    address = f"{network.hosts[0].address}:6379"
    with contextlib.ExitStack() as nodes:
        for host in network.hosts:
            nodes.enter_context(ray_node(host, address))
        run = start("three", address, FEW_STEPS, *NODES)
        run.wait_for_step(1)
        network.cut(network.hosts[2])
        time.sleep(DOWN_S)
        network.mend(network.hosts[2])
        run.wait_for_step(3)
        network.cut(network.hosts[2])
        cut = time.monotonic()
        run.wait_until(lambda: "node 10.77.0.3 is lost; 1 rollout engine left" in run.said)
        print(f"lost {time.monotonic() - cut:.0f} s after the cut")
        run.finish()
    engines = [row["rollout/num_engines"] for step, row in sorted(metrics_by_step(run.folder).items()) if step]
    print(f"{time.monotonic() - cut:.0f} s from the cut to the end, engines {engines}")
    assert engines[:3] == [2, 2, 2] and engines[-1] == 1, engines
    undisturbed = start("one", "local", FEW_STEPS)
    undisturbed.finish()
    assert_same(undisturbed, run, FEW_STEPS)


@pytest.mark.parametrize("way", ["objects", "broadcast"])
def test_a_host_is_lost_and_another_joins(network: Network, start: Start, way: str) -> None:
    """Every metric that is not a time, and every weight, to the last bit those of one undisturbed host."""
    address = f"{network.hosts[0].address}:6379"
    with ray_node(network.hosts[0], address), ray_node(network.hosts[1], address):
        with ray_node(network.hosts[2], address):
            run = start("three", address, STEPS, *NODES, f"{BETWEEN_NODES}={way}")
            run.wait_for_step(2)
            network.hosts[2].power_off()
        lost = time.monotonic()
        with ray_node(network.add(), address):
            run.finish()
    told = [line for line in run.said.splitlines() if "node 10.77" in line]
    print("\n".join(told), f"{time.monotonic() - lost:.0f} s from the loss to the end")
    assert any("node 10.77.0.3 is lost; 1 rollout engine left" in line for line in told), run.said
    assert any("node 10.77.0.4 has joined" in line for line in told), run.said
    engines = [row["rollout/num_engines"] for step, row in sorted(metrics_by_step(run.folder).items()) if step]
    assert engines[:2] == [2, 2] and 1 in engines and engines[-1] == 2, engines

    undisturbed = start("one", "local", STEPS)
    undisturbed.finish()
    assert_same(undisturbed, run, STEPS)
