"""Several nodes, which are hosts with a network of their own: who is first, who reaches whom, who sees the run."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hosts
import pytest
from e2e_world import ROOT
from hosts import Host, Network, ray_cluster

from verl.single_controller.nodes import interface_of

pytestmark = pytest.mark.timeout(900)  # three Rays start for the first test
PYTHON, PROBE = ROOT / ".venv/bin/python", Path(__file__).with_name("driver_probe.py")
ROLLOUT = "actor_rollout_ref.rollout"

SET_HERE = {"NCCL_IB_HCA": "mlx5_0", "HF_HOME": "/models/hf", "HF_TOKEN": "hf_of_a_user", "VLLM_HOST_IP": "10.77.0.9"}

Ask = Callable[..., Any]


class Driver:
    """A process on a host that answers what functions of `driver_probe.py` return."""

    def __init__(self, host: Host, address: str, log: Path) -> None:
        self._log = log
        variables = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"} | SET_HERE
        command = ("bash", "-c", 'exec "$0" "$1" 2> "$2"', str(PYTHON), str(PROBE), str(log))
        self._process = host.start(*command, stdin=subprocess.PIPE, **variables)

    def ask(self, function: str, *arguments: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, *arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer "):  # Ray prints there, too
                return json.loads(line.removeprefix("answer "))
        raise AssertionError(self._log.read_text()[-4000:])

    def close(self) -> None:
        """Lets it leave the cluster."""
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(3, tmp_path_factory.mktemp("hosts")) as network, ray_cluster(network.hosts, num_gpus=8) as address:
        network.address = address
        yield network


@pytest.fixture(scope="module")
def ask(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """What a driver on the host of that number finds."""
    drivers: dict[int, Driver] = {}
    with ExitStack() as at_the_end:

        def ask(number: int, function: str, *arguments: object) -> Any:
            if number not in drivers:
                log = tmp_path_factory.mktemp("driver") / "log"
                drivers[number] = Driver(network.hosts[number], network.address, log)
                at_the_end.callback(drivers[number].close)
            return drivers[number].ask(function, *arguments)

        yield ask


def test_the_driver_s_node_is_first_and_the_others_follow_by_address(ask: Ask, tmp_path: Path) -> None:
    table = "layout: 3 training ranks and 1 engine on CPU of 3 nodes: 10.77.0.2, 10.77.0.1, 10.77.0.3"
    assert ask(1, "reserved", 3, str(tmp_path)) == table
    assert not list(tmp_path.iterdir()), "the marker is taken away"


def test_whole_nodes_that_only_sample(ask: Ask, tmp_path: Path) -> None:
    """The driver's node trains."""
    nodes = ("trainer.layout=split", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.num_engines=2")
    assert ask(1, "reserved", 1, str(tmp_path), *nodes) == (
        "layout: 1 training rank on CPU of 1 node: 10.77.0.2, 2 engines on CPU of 2 nodes: 10.77.0.1, 10.77.0.3"
    )


def test_a_run_that_may_have_fewer_nodes_takes_those_that_are_there(ask: Ask, tmp_path: Path) -> None:
    """Two of the copies of the model that three nodes in pairs would hold are none, so two nodes are taken."""
    fewer, pairs = "trainer.min_nnodes=2", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2"
    assert ask(0, "reserved", 5, str(tmp_path), fewer).startswith("layout: 3 training ranks")
    assert ask(0, "reserved", 4, str(tmp_path), fewer, pairs).startswith("layout: 2 training ranks")


def test_a_judge_gets_the_gpus_that_a_dry_run_leaves_it(ask: Ask, tmp_path: Path) -> None:
    """Of three nodes of eight: some of one node, what each node has left, all of one node, and what one that samples
    has left.
    """
    apart = f"trainer.layout=split {ROLLOUT}.nnodes=1"
    for overrides, found in {
        "reward.n_gpus=6": [[8, 8], 6, False],
        "reward.n_gpus=1": [[7, 7, 7], 1, True],
        f"reward.n_gpus=8 {apart}": [[8, 8], 8, False],
        f"reward.n_gpus=2 {apart} {ROLLOUT}.n_gpus_per_node=6": [[8, 8, 6], 2, True],
    }.items():
        assert ask(0, "with_judge", "3x8x80", str(tmp_path), *overrides.split()) == found, overrides


def test_a_folder_that_other_nodes_do_not_see(ask: Ask) -> None:
    """Each host has shared memory of its own."""
    error = ask(0, "reserved", 3, "/dev/shm")
    assert error.startswith("ConfigError: trainer.default_local_dir=/dev/shm is a different folder on 10.77.0.2, 10.77")
    assert "trainer.gather_state=true" in error


def test_files_go_between_nodes_that_do_not_share_the_run_s_folder(ask: Ask) -> None:
    """What a rank writes elsewhere is brought here whole; what is lent is gone afterwards. A folder that is no part of
    the run may be there on both, and stays.
    """
    found = ask(0, "copied", "/dev/shm/run")
    assert found["arrived"] and found["lent"] and found["left"] == []
    assert re.match("CheckpointError: on host host[23] there is a different /dev/shm/another already", found["another"])
    assert found["kept"] == found["mine"] == ["/dev/shm/another/manifest.json"]


def test_a_worker_elsewhere_has_the_driver_s_variables_for_libraries(ask: Ask) -> None:
    """Its Ray was started without them. Secrets, and what is true of one node, stay where they are."""
    address, *values = ask(0, "seen_by_a_worker", *SET_HERE)
    assert address in ("10.77.0.2", "10.77.0.3") and values == ["mlx5_0", "/models/hf", None, None]


def test_the_bandwidth_between_nodes_is_checked(network: Network, tmp_path: Path) -> None:
    """By gloo: the stage of the first run that GPUs have NCCL for, and its least bandwidth."""
    script = ("bash", "scripts/gpu/first_run.sh", "--device", "cpu", "--stages", "11", "--nodes", "3")
    out = tmp_path / "out"
    access = {"RAY_ADDRESS": network.address, "RAY_AUTH_MODE": "token"}
    said = network.hosts[0].run(*script, "--output_dir", str(out), **access).stdout
    found = re.search(
        r"PASS all-reduce between nodes: 3 nodes of 2 ranks, bus bandwidth up to (\S+) GB/s by gloo", said
    )
    assert found and float(found[1]) > 0, said
    assert "| MiB | bus bandwidth, GB/s |" in (out / "report.md").read_text()


def test_nodes_that_do_not_reach_each_other_are_named(network: Network, ask: Ask, tmp_path: Path) -> None:
    """Ray itself notices nothing: both reach its head."""
    network.isolate(*network.hosts[1:])
    message = ask(0, "reserved", 3, str(tmp_path))
    assert message.startswith("WorkerError: 10.77.0.2 does not reach 10.77.0.3 (")
    assert ", 10.77.0.3 does not reach 10.77.0.2 (" in message and "10.77.0.1 does not reach" not in message


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None


def test_the_hosts_of_another_test_session_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes none of the test's time."""
    monkeypatch.setattr(hosts, "LOCK", tmp_path / "lock")
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    with hosts.LOCK.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        begun = time.monotonic()
        threading.Timer(1.0, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with hosts.alone():
            assert time.monotonic() - begun > 0.9
            assert left - signal.getitimer(signal.ITIMER_REAL)[0] < 0.5
