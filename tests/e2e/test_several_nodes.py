"""Two hosts with a network, memory and processes of their own do exactly what one host with as many workers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import ROOT, metrics_by_step, small_run
from hosts import Network, ray_cluster, wait_for_port
from safetensors.torch import load_file

pytestmark = pytest.mark.slow  # four runs of five steps, two minutes of a core each
PYTHON = str(ROOT / ".venv/bin/python")
TIMED = ("timing", "perf", "memory_gib")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(2, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture(scope="module")
def url(network: Network, tinywiki: Path) -> Iterator[str]:
    """A retriever on the first host, which both reach."""
    host = network.hosts[0]
    where = {"HOST": "0.0.0.0", "PORT": "8000", "CORPUS_PATH": str(tinywiki / "corpus.jsonl")}
    server = host.start("bash", "retrieval_launch.sh", **where)
    wait_for_port(host, f"{host.address}:8000", timeout_s=600)
    yield f"http://{host.address}:8000/retrieve"
    server.terminate()
    server.communicate(timeout=120)


ALGORITHMS = {
    "grpo_ema_pg": (),
    "ppo": ("algorithm.adv_estimator=gae",),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_hosts_do_what_one_does(
    algorithm: str, network: Network, url: str, tinywiki: Path, policy: Path, tmp_path: Path
) -> None:
    """Five steps: every metric that is not a time, and every weight, to the last bit."""

    def train(name: str, ray_address: str, *sizes: str) -> Path:
        settings = ("trainer.total_training_steps=5", "trainer.test_freq=5", "trainer.deterministic=true")
        more = (*settings, "actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[]", *ALGORITHMS[algorithm])
        critic = (f"critic.model.path={policy}",) if algorithm == "ppo" else ()
        command = small_run(tinywiki, policy, url, tmp_path / name, *more, *critic, *sizes)
        print(network.hosts[0].run(PYTHON, *command, RAY_ADDRESS=ray_address, RAY_AUTH_MODE="token").stderr)
        return tmp_path / name

    one = train("one", "local", "trainer.n_gpus_per_node=2")
    with ray_cluster(network.hosts) as address:
        two = train("two", address, "trainer.nnodes=2")
    assert metrics_of(two) == metrics_of(one) and len(metrics_of(one)[5]) > 60
    roles = ["actor", "ref", *(["critic"] if algorithm == "ppo" else [])]
    for role in roles:
        weights = [load_file(folder / role / "global_step_5" / "model.safetensors") for folder in (one, two)]
        assert weights[0].keys() == weights[1].keys()
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0]), role


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Those that are not of the clock or of the machine."""
    steps = metrics_by_step(folder)
    return {
        step: {name: value for name, value in row.items() if not name.startswith(TIMED) and name != "time"}
        for step, row in steps.items()
    }
