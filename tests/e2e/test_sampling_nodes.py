"""Hosts that only sample, beside one that trains: the same numbers as on one host, also when one of them is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import Network, ray_node
from runs_on_hosts import HostRun, assert_same, retriever_on

pytestmark = pytest.mark.slow  # two runs of forty steps, two to three minutes each
STEPS = 40  # an engine takes longer to start than some of them
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


@pytest.mark.parametrize("way", ["objects", "broadcast"])
def test_a_host_is_lost_and_another_joins(
    network: Network, url: str, tinywiki: Path, policy: Path, tmp_path: Path, way: str
) -> None:
    """Every metric that is not a time, and every weight, to the last bit those of one undisturbed host."""

    def start(name: str, ray_address: str, *layout: str) -> HostRun:
        settings = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.deterministic=true")
        more = (*settings, "actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[]", *layout)
        command = small_run(tinywiki, policy, url, tmp_path / name, *more)
        return HostRun(network.hosts[0], tmp_path / name, command, ray_address)

    address = f"{network.hosts[0].address}:6379"
    with ray_node(network.hosts[0], address), ray_node(network.hosts[1], address):
        with ray_node(network.hosts[2], address):
            run = start("three", address, *NODES, f"{BETWEEN_NODES}={way}")
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

    undisturbed = start("one", "local")
    undisturbed.finish()
    assert_same(undisturbed, run, STEPS)
