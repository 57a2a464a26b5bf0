"""A script for several nodes, submitted to the cluster that runs it, from another host: trained, and told to end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import Host, Network, ray_node, wait_for_port
from runs_on_hosts import PYTHON, retriever_on

from verl.run import saved_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = "example/multinode/train_grpo_multinode_32b.sh"
CPU = (
    *("trainer.device=cpu", "trainer.test_freq=-1", "trainer.logger=[]"),
    *("data.max_response_length=40", "data.max_prompt_length=512", "data.max_start_length=128"),
    *(
        "max_turns=2",
        "data.max_obs_length=96",
        "actor_rollout_ref.rollout.kv_cache_gib=0.25",
        "actor_rollout_ref.rollout.dtype=float32",
    ),
    *("actor_rollout_ref.actor.ppo_micro_batch_size=24", "actor_rollout_ref.ref.log_prob_micro_batch_size=24"),
    *("actor_rollout_ref.rollout.log_prob_micro_batch_size=24", "data.val_batch_size=32"),
    *("actor_rollout_ref.rollout.tensor_model_parallel_size=1",),
)


RAY = str(Path(PYTHON).with_name("ray"))
NOTICE = (PYTHON, "scripts/cluster/give_notice.py", "--wait_s", "600")


class Cluster(NamedTuple):
    """Two nodes, the first of which is the head. Jobs are submitted from the other."""

    head: Host
    other: Host
    url: str  # of the retriever

    @property
    def access(self) -> dict[str, str]:
        return {"RAY_DASHBOARD_ADDRESS": f"http://{self.head.address}:8265", "RAY_AUTH_MODE": "token"}

    def submit(self, command: tuple[str, ...], nnodes: int) -> tuple[str, Callable[[], str]]:
        """The name of the job, and what follows its log to the end and returns it."""
        sizes = {"N_NODES": str(nnodes), "N_GPUS": "1", "EXPERIMENT_NAME": "submitted"}
        submitted = self.other.run("bash", SCRIPT, *command[4:], **sizes, **self.access)
        found = re.search(r"submitted as (\S+)\. What it prints: (.+)", submitted.stdout)
        assert found, submitted.stdout + submitted.stderr
        return found[1], lambda: self.other.output("bash", "-c", found[2], **self.access)


@pytest.fixture(scope="module")
def cluster(tinywiki: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Network(2, tmp_path_factory.mktemp("hosts")) as network:
        head, other = network.hosts
        address = f"{head.address}:6379"
        with (
            retriever_on(head, tinywiki / "corpus.jsonl") as url,
            ray_node(head, address, job_server=True),
            ray_node(other, address),
        ):
            wait_for_port(other, f"{head.address}:8265")
            yield Cluster(head, other, url)


def test_a_submitted_run_trains_on_the_cluster(cluster: Cluster, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """It is submitted over the network with the cluster's token; the log that the script names is the run's."""
    folder = tmp_path / "run"
    command = small_run(tinywiki, policy, cluster.url, folder, *CPU, "trainer.total_training_steps=2")
    said = cluster.submit(command, nnodes=1)[1]()
    assert "succeeded" in said, said
    assert list(metrics_by_step(folder)) == [1, 2], said


def test_a_notice_loses_no_step(cluster: Cluster, tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """A run on both nodes saves nothing but for that: first both nodes are to be stopped, then the resumed run is by
    `ray job stop`.
    """
    folder = tmp_path / "run"
    endless = ("trainer.total_training_steps=200", "trainer.save_freq=-1", "trainer.sigterm_grace_s=600")
    engines = ("actor_rollout_ref.rollout.num_engines=2", "trainer.resume_mode=auto")
    command = small_run(tinywiki, policy, cluster.url, folder, *CPU, *endless, *engines)
    done = 0
    for by_job_stop in (False, True):
        job, log = cluster.submit(command, nnodes=2)
        wait_for_step(folder, done + 1, cluster, log)
        if by_job_stop:
            # RAY_ADDRESS, which the tests set, would win over --address.
            stop = (RAY, "job", "stop", f"--address={cluster.access['RAY_DASHBOARD_ADDRESS']}", job)
            cluster.other.run("env", "-u", "RAY_ADDRESS", *stop, **cluster.access)
        else:
            named = {"RAY_ADDRESS": f"{cluster.head.address}:6379", "RAY_AUTH_MODE": "token"}
            told = [host.start(*NOTICE, **named) for host in (cluster.head, cluster.other)]
            outputs = [process.communicate(timeout=600) for process in told]
            assert [process.returncode for process in told] == [0, 0], outputs
        said = log()
        done = max(metrics_by_step(folder))
        newest, _ = saved_state.newest(folder)
        assert newest is not None and saved_state.step_of(newest) == done, said[-6000:]
        assert "the run ends after this step and saves it" in said and "Traceback" not in said, said[-6000:]


def wait_for_step(folder: Path, step: int, cluster: Cluster, log: Callable[[], str]) -> None:
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.is_file() and step in metrics_by_step(folder)):
        assert cluster.head.processes("verl.trainer.main_ppo") or time.monotonic() < deadline - 540, log()
        assert time.monotonic() < deadline
        time.sleep(0.2)
