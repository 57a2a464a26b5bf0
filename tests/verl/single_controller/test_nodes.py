"""Several nodes, which are hosts with a network of their own: who is first, who reaches whom, who sees the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import ROOT
from hosts import Network, ray_cluster

from verl.single_controller.nodes import interface_of

PYTHON, PROBE = str(ROOT / ".venv/bin/python"), str(Path(__file__).with_name("nodes_probe.py"))
JUDGE_PROBE = str(Path(__file__).with_name("judge_probe.py"))
COPIES_PROBE = str(Path(__file__).with_name("folder_copies_probe.py"))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(3, tmp_path_factory.mktemp("hosts")) as network, ray_cluster(network.hosts, num_gpus=8) as address:
        network.address = address
        yield network


def asked(network: Network, number: int, run_dir: Path, *overrides: str, nnodes: int = 3) -> dict[str, str]:
    """What a driver on that host finds."""
    variables = {"RAY_ADDRESS": network.address, "RAY_AUTH_MODE": "token"}
    done = network.hosts[number].run(PYTHON, PROBE, str(nnodes), str(run_dir), *overrides, **variables)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_driver_s_node_is_first_and_the_others_follow_by_address(network: Network, tmp_path: Path) -> None:
    found = asked(network, 1, tmp_path)
    assert found["table"] == "layout: 3 training ranks and 1 engine on CPU of 3 nodes: 10.77.0.2, 10.77.0.1, 10.77.0.3"
    assert not list(tmp_path.iterdir()), "the marker is taken away"


def test_whole_nodes_that_only_sample(network: Network, tmp_path: Path) -> None:
    """The driver's node trains."""
    rollout = "actor_rollout_ref.rollout"
    nodes = ("trainer.layout=split", f"{rollout}.nnodes=2", f"{rollout}.num_engines=2")
    assert asked(network, 1, tmp_path, *nodes, nnodes=1)["table"] == (
        "layout: 1 training rank on CPU of 1 node: 10.77.0.2, 2 engines on CPU of 2 nodes: 10.77.0.1, 10.77.0.3"
    )


def test_a_run_that_may_have_fewer_nodes_takes_those_that_are_there(network: Network, tmp_path: Path) -> None:
    """Two of the copies of the model that three nodes in pairs would hold are none, so two nodes are taken."""
    assert asked(network, 0, tmp_path, "trainer.min_nnodes=2", nnodes=5)["table"].startswith("layout: 3 training ranks")
    pairs = ("trainer.min_nnodes=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2")
    assert asked(network, 0, tmp_path, *pairs, nnodes=4)["table"].startswith("layout: 2 training ranks")


def test_a_judge_gets_the_gpus_that_a_dry_run_leaves_it(network: Network, tmp_path: Path) -> None:
    """Of three nodes of eight: all of one node, some of one node, what each node has left, and what one that samples
    has left.
    """
    rollout = "actor_rollout_ref.rollout"
    apart = f"trainer.layout=split {rollout}.nnodes=1"
    cases = {
        "reward.n_gpus=8": ([8, 8], 8, False),
        "reward.n_gpus=6": ([8, 8], 6, False),
        "reward.n_gpus=1": ([7, 7, 7], 1, True),
        f"reward.n_gpus=8 {apart}": ([8, 8], 8, False),
        f"reward.n_gpus=2 {apart} {rollout}.n_gpus_per_node=6": ([8, 8, 6], 2, True),
    }
    variables = {"RAY_ADDRESS": network.address, "RAY_AUTH_MODE": "token"}
    done = network.hosts[0].run(PYTHON, JUDGE_PROBE, "3x8x80", str(tmp_path), *cases, **variables)
    found = [(one["roles"], one["server"], one["beside"]) for one in json.loads(done.stdout.splitlines()[-1])]
    assert found == list(cases.values())


def test_a_folder_that_other_nodes_do_not_see(network: Network) -> None:
    """Each host has shared memory of its own."""
    found = asked(network, 0, Path("/dev/shm"))
    assert found["error"].startswith(
        "ConfigError: trainer.default_local_dir=/dev/shm is a different folder on 10.77.0.2, 10.77"
    )

    assert "trainer.gather_state=true" in found["error"]


def test_files_go_between_nodes_that_do_not_share_the_run_s_folder(network: Network) -> None:
    """What a rank writes elsewhere is brought here whole; what is lent is gone afterwards. A folder that is no part of
    the run may be there on both, and stays.
    """
    variables = {"RAY_ADDRESS": network.address, "RAY_AUTH_MODE": "token"}
    done = network.hosts[0].run(PYTHON, COPIES_PROBE, "/dev/shm/run", **variables)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["arrived"] and found["lent"] and found["left"] == []
    assert re.match("CheckpointError: on host host[23] there is a different /dev/shm/another already", found["another"])
    assert found["kept"] == found["mine"] == ["/dev/shm/another/manifest.json"]


def test_nodes_that_do_not_reach_each_other_are_named(network: Network, tmp_path: Path) -> None:
    """Ray itself notices nothing: both reach its head."""
    network.isolate(*network.hosts[1:])
    message = asked(network, 0, tmp_path)["error"]
    assert message.startswith("WorkerError: 10.77.0.2 does not reach 10.77.0.3 (")
    assert ", 10.77.0.3 does not reach 10.77.0.2 (" in message and "10.77.0.1 does not reach" not in message


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
