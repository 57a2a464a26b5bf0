"""Hosts with a network, memory and processes of their own do exactly what one host with as many workers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import small_run
from hosts import Network, ray_cluster
from runs_on_hosts import SETTINGS, SHORT, SHORT_STEPS, HostRun, OneHost, assert_same, retriever_on


@pytest.fixture(scope="module")
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Hosts with a Ray cluster on them, for all cases of that size."""
    with Network(request.param, tmp_path_factory.mktemp("hosts")) as network, ray_cluster(network.hosts) as address:
        network.address = address
        yield network


@pytest.fixture(scope="module")
def url(network: Network, tinywiki: Path) -> Iterator[str]:
    with retriever_on(network.hosts[0], tinywiki / "corpus.jsonl") as url:
        yield url


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_retriever_that_does_not_start_is_noticed_at_once(network: Network, tmp_path: Path) -> None:
    """With what it said: the fixture of all tests on hosts does not wait for a port that nobody will open."""
    shown = pytest.raises(AssertionError, match=r"(?s)ended with 2\n.*nowhere.jsonl")
    with shown, retriever_on(network.hosts[1], tmp_path / "nowhere.jsonl"):
        pytest.fail("there is no corpus")


OWN_PORT = 8001
CASES = [  # a run on the hosts and one to compare it with; the first case alone is not too slow for every day
    pytest.param(2, "grpo"),
    pytest.param(2, "ppo", marks=pytest.mark.slow),
    pytest.param(2, "ppo_own_critic", marks=pytest.mark.slow),
    pytest.param(3, "grpo", marks=pytest.mark.slow),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("network", "algorithm"), CASES, indirect=["network"])
def test_several_hosts_do_what_one_does(
    algorithm: str, network: Network, url: str, one_host: OneHost, tinywiki: Path, policy: Path, tmp_path: Path
) -> None:
    """Every metric that is not a time, and every weight, to the last bit. PPO starts its retrievers; its critic takes
    turns with the actor, or on several hosts has a worker of its own on each.
    """
    has_critic, num_hosts = algorithm != "grpo", len(network.hosts)
    ppo = ("algorithm.adv_estimator=gae", f"critic.model.path={policy}") if has_critic else ()
    apart = ("trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1") if algorithm == "ppo_own_critic" else ()
    launch = f"CORPUS_PATH={tinywiki / 'corpus.jsonl'} PORT={OWN_PORT} bash retrieval_launch.sh"
    own = ("retriever.placement=per_node", f"retriever.launch='{launch}'")
    asked = (*own, f"retriever.url=http://127.0.0.1:{OWN_PORT}/retrieve") if has_critic else ()
    sizes = (f"trainer.nnodes={num_hosts}", f"actor_rollout_ref.rollout.num_engines={num_hosts}")
    settings = (*SETTINGS, *SHORT, *ppo, *sizes, *asked, *apart)
    command = small_run(tinywiki, policy, url, tmp_path / "run", *settings)
    run = HostRun(network.hosts[0], tmp_path / "run", command, network.address)
    run.finish()
    assert not any(host.processes(f"--port {OWN_PORT}") for host in network.hosts), "they end with the run"
    alone = one_host.short_run_with(num_hosts, *ppo, name="ppo" if has_critic else "grpo")
    assert_same(alone, run.folder, SHORT_STEPS)
    assert (run.folder / "critic" / f"global_step_{SHORT_STEPS}").is_dir() == has_critic
