"""Hosts that only sample, beside one that trains: the same numbers as on one host, also when one of them is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import ROOT, metrics_by_step, small_run
from hosts import Command, Network, ray_node, wait_for_port
from safetensors.torch import load_file

pytestmark = pytest.mark.slow  # two runs of forty steps, two to three minutes each
PYTHON = str(ROOT / ".venv/bin/python")
TIMED = ("timing", "perf", "memory_gib")
STEPS = 40  # an engine takes longer to start than some of them
NODES = ("trainer.layout=split", "actor_rollout_ref.rollout.nnodes=2")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(3, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture(scope="module")
def url(network: Network, tinywiki: Path) -> Iterator[str]:
    host = network.hosts[0]
    where = {"HOST": "0.0.0.0", "PORT": "8000", "CORPUS_PATH": str(tinywiki / "corpus.jsonl")}
    server = host.start("bash", "retrieval_launch.sh", **where)
    wait_for_port(host, f"{host.address}:8000", timeout_s=600)
    yield f"http://{host.address}:8000/retrieve"
    server.terminate()
    server.communicate(timeout=120)


def test_a_host_is_lost_and_another_joins(
    network: Network, url: str, tinywiki: Path, policy: Path, tmp_path: Path
) -> None:
    """Every metric that is not a time, and every weight, to the last bit those of one undisturbed host."""

    def start(name: str, ray_address: str, *layout: str) -> Command:
        settings = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.deterministic=true")
        more = (*settings, "actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[console]", *layout)
        command = small_run(tinywiki, policy, url, tmp_path / name, *more)
        return network.hosts[0].start(PYTHON, *command, RAY_ADDRESS=ray_address, RAY_AUTH_MODE="token")

    address = f"{network.hosts[0].address}:6379"
    with ray_node(network.hosts[0], address), ray_node(network.hosts[1], address):
        with ray_node(network.hosts[2], address):
            run = start("three", address, *NODES)
            wait_for_step(run, tmp_path / "three", 2)
            network.hosts[2].power_off()
        lost = time.monotonic()
        with ray_node(network.add(), address):
            output, errors = run.communicate(timeout=1200)
    assert run.returncode == 0, output + errors
    told = [line for line in (output + errors).splitlines() if "node 10.77" in line]
    print("\n".join(told), f"{time.monotonic() - lost:.0f} s from the loss to the end")
    assert any("node 10.77.0.3 is lost; 1 rollout engine left" in line for line in told), output + errors
    assert any("node 10.77.0.4 has joined" in line for line in told), output + errors
    engines = [row["rollout/num_engines"] for step, row in sorted(metrics_by_step(tmp_path / "three").items()) if step]
    assert engines[:2] == [2, 2] and 1 in engines and engines[-1] == 2, engines

    undisturbed = start("one", "local")
    output, errors = undisturbed.communicate(timeout=1200)
    assert undisturbed.returncode == 0, output + errors
    assert metrics_of(tmp_path / "three") == metrics_of(tmp_path / "one")
    for role in ("actor", "ref"):
        saved = Path(role, f"global_step_{STEPS}", "model.safetensors")
        one, three = (load_file(tmp_path / name / saved) for name in ("one", "three"))
        assert all(one[name].equal(three[name]) for name in one), role


def wait_for_step(run: Command, folder: Path, step: int) -> None:
    """Until the step is in the run's metrics."""
    deadline = time.monotonic() + 900
    while not (folder / "metrics.jsonl").is_file() or step not in metrics_by_step(folder):
        assert run.poll() is None, "".join(run.communicate())
        assert time.monotonic() < deadline
        time.sleep(0.2)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Those that are not of the clock or of the machine."""
    steps = metrics_by_step(folder)
    return {
        step: {
            name: value
            for name, value in row.items()
            if not name.startswith(TIMED) and name not in ("time", "rollout/num_engines")
        }
        for step, row in steps.items()
    }
