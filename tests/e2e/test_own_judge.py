"""A run whose reward asks a judge that it starts itself, on the GPUs of a host where nothing else of it is."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e_world import ROOT, metrics_by_step, small_run
from hosts import Network, ray_node
from runs_on_hosts import HostRun, retriever_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REWARD = (
    "reward.function=search_r1.rewards.composite.CompositeReward",
    "reward.kwargs={weights: {judge: 1, exact_match: 0}, "
    "options: {judge: {url: 'http://{server}/v1', model: m, retries: 0}}}",
    "reward.n_gpus=1",
)
JUDGE = "judge_server.py"


def test_a_judge_on_a_host_of_its_own(tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """Answers are judged, and the judge is gone when the run is."""
    launch = f'exec "{ROOT}/.venv/bin/python" "{ROOT}/tests/helpers/{JUDGE}" 0.0.0.0 $PORT'
    steps = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "+trainer.val_before_train=false")
    with Network(2, tmp_path) as network:
        first, other = network.hosts
        address = f"{first.address}:6379"
        with ExitStack() as up:
            url = up.enter_context(retriever_on(first, tinywiki / "corpus.jsonl"))
            for host, num_gpus in ((first, 0), (other, 1)):
                up.enter_context(ray_node(host, address, num_gpus=num_gpus))
            more = (*steps, *REWARD, f"reward.launch='{launch}'", "trainer.logger=[]", "trainer.device=cpu")
            command = small_run(tinywiki, policy, url, tmp_path / "run", *more)
            run = HostRun(first, tmp_path / "run", command, address)
            run.wait_until(lambda: other.processes(JUDGE))
            run.finish()
            assert not other.processes(JUDGE)
    assert f"the reward's server: on GPUs 0 of {other.address}" in run.said
    assert f"the reward's server listens at {other.address}:8001" in run.said
    assert all(0 < metrics_by_step(run.folder)[step]["reward/judge"] <= 0.5 for step in (1, 2))
