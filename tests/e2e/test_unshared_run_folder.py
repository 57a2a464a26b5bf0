"""Two hosts that do not share the run's folder: the driver's has all of it, also when the run is killed and resumed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from e2e_world import small_run
from hosts import Network, ray_cluster
from runs_on_hosts import SETTINGS, STEPS, HostRun, OneHost, assert_same, retriever_on

from verl.run import saved_state


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_killed_and_goes_on(one_host: OneHost, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """To the bits of a run on one host."""
    folder = tmp_path / "run"
    folder.mkdir()
    layout = ("trainer.nnodes=2", "trainer.gather_state=true", "actor_rollout_ref.rollout.num_engines=2")
    with Network(2, tmp_path) as network:
        first, other = network.hosts
        other.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
        with retriever_on(first, tinywiki / "corpus.jsonl") as url, ray_cluster(network.hosts) as address:
            command = small_run(tinywiki, policy, url, folder, *SETTINGS, *layout)
            run = HostRun(first, folder, command, address)
            run.wait_until(saved_state.state_path(folder, 2).is_dir)
            run.process.send_signal(signal.SIGKILL)
            assert run.end() != 0 and not saved_state.state_path(folder, STEPS).is_dir()
            run = HostRun(first, folder, command, address)
            run.finish()
        left = other.run("find", str(folder), "-type", "f", "-not", "-path", "*/.global_step_*").stdout
        assert not left, "nothing of the run stays there"
    for state in saved_state.saved(folder):
        saved_state.verify(state)
        assert {"__0_0.distcp", "__1_0.distcp"} <= {*os.listdir(state / "actor")}
    assert saved_state.state_path(folder, STEPS).is_dir()
    assert_same(one_host.run_with(2), folder)
