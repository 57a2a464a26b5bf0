"""Hosts with a network, memory and processes of their own do exactly what one host with as many workers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import small_run
from hosts import Network, ray_cluster
from runs_on_hosts import HostRun, assert_same, retriever_on


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(request.param, tmp_path_factory.mktemp("hosts")) as network:
        yield network


@pytest.fixture(scope="module")
def url(network: Network, tinywiki: Path) -> Iterator[str]:
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:
        yield url


ALGORITHMS = {
    "grpo_ema_pg": (),
    "ppo": ("algorithm.adv_estimator=gae",),
    "ppo_own_critic": ("algorithm.adv_estimator=gae",),
}
OWN_PORT = 8001
CASES = [  # two runs of five steps each, two to seven minutes; the first one alone is not too slow for every day
    pytest.param(number, algorithm, marks=() if (number, algorithm) == (2, "grpo_ema_pg") else pytest.mark.slow)
    for number in (2, 4)
    for algorithm in ALGORITHMS
]


@pytest.mark.parametrize(("network", "algorithm"), CASES, indirect=["network"])
def test_several_hosts_do_what_one_does(
    algorithm: str, network: Network, url: str, tinywiki: Path, policy: Path, tmp_path: Path
) -> None:
    """Five steps: every metric that is not a time, and every weight, to the last bit. PPO starts its retrievers; its
    critic takes turns with the actor, or on several hosts has a worker of its own on each.
    """
    has_critic, num_hosts = "ppo" in algorithm, len(network.hosts)

    def train(name: str, ray_address: str, *sizes: str) -> HostRun:
        settings = ("trainer.total_training_steps=5", "trainer.test_freq=5", "trainer.deterministic=true")
        settings += ("trainer.val_before_train=false",)
        engines = f"actor_rollout_ref.rollout.num_engines={num_hosts}"
        more = (*settings, engines, "trainer.logger=[]", *ALGORITHMS[algorithm])
        critic = (f"critic.model.path={policy}",) if has_critic else ()
        command = small_run(tinywiki, policy, url, tmp_path / name, *more, *critic, *sizes)
        run = HostRun(network.hosts[0], tmp_path / name, command, ray_address)
        run.finish()
        return run

    one = train("one", "local", f"trainer.n_gpus_per_node={num_hosts}")
    apart = ("trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1") if algorithm == "ppo_own_critic" else ()
    launch = f"CORPUS_PATH={tinywiki / 'corpus.jsonl'} PORT={OWN_PORT} bash retrieval_launch.sh"
    own = ("retriever.placement=per_node", f"retriever.launch='{launch}'")
    asked = (*own, f"retriever.url=http://127.0.0.1:{OWN_PORT}/retrieve") if has_critic else ()
    with ray_cluster(network.hosts) as address:
        several = train("several", address, f"trainer.nnodes={num_hosts}", *asked, *apart)
        assert not any(host.processes(f"--port {OWN_PORT}") for host in network.hosts), "they end with the run"
    assert_same(one, several, step=5)
    assert (several.folder / "critic" / "global_step_5").is_dir() == has_critic
