"""Two hosts that do not share the run's folder: the driver's has all of it, also when the run is killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_world import small_run
from hosts import Network, ray_cluster
from runs_on_hosts import HostRun, assert_same, retriever_on

from verl.trainer import saved_state

pytestmark = pytest.mark.slow  # three runs of up to four steps, four minutes in all
STEPS = 4


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with Network(2, tmp_path_factory.mktemp("hosts")) as network:
        yield network


def test_a_run_is_killed_and_goes_on(network: Network, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """To the bits of a run on one host."""
    first, other = network.hosts

    def start(name: str, ray_address: str, *layout: str) -> HostRun:
        times = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=-1")
        settings = ("actor_rollout_ref.rollout.num_engines=2", "trainer.logger=[]", "trainer.deterministic=true")
        more = (*times, *settings, "trainer.resume_mode=auto", "+trainer.val_before_train=false", *layout)
        return HostRun(first, tmp_path / name, small_run(tinywiki, policy, url, tmp_path / name, *more), ray_address)

    folder = tmp_path / "two"
    folder.mkdir()
    other.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    with retriever_on(first, tinywiki / "corpus.jsonl") as url:
        with ray_cluster(network.hosts) as address:
            layout = ("trainer.nnodes=2", "trainer.gather_state=true")
            run = start("two", address, *layout)
            run.wait_until(saved_state.state_path(folder, 2).is_dir)
            run.process.send_signal(signal.SIGKILL)
            assert run.end() != 0
            run = start("two", address, *layout)
            run.finish()
        one = start("one", "local", "trainer.n_gpus_per_node=2")
        one.finish()
    for state in saved_state.saved(folder):
        saved_state.verify(state)
        assert {"__0_0.distcp", "__1_0.distcp"} <= {*os.listdir(state / "actor")}
    assert saved_state.state_path(folder, STEPS).is_dir()
    left = other.run("find", str(folder), "-type", "f", "-not", "-path", "*/.global_step_*").stdout
    assert not left, "nothing of the run stays there"
    assert_same(one, run, STEPS)
