"""A script for several nodes, submitted from a host of its own to the cluster that runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e_world import metrics_by_step, small_run
from hosts import Network, ray_node, wait_for_port
from runs_on_hosts import retriever_on

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = "example/multinode/train_grpo_multinode_32b.sh"
CPU = (
    *("trainer.device=cpu", "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.logger=[]"),
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


def test_a_submitted_run_trains_on_the_cluster(tinywiki: Path, policy: Path, tmp_path: Path) -> None:
    """It is submitted over the network with the cluster's token; the log that the script names is the run's."""
    with Network(2, tmp_path) as network:
        head, office = network.hosts
        with retriever_on(head, tinywiki / "corpus.jsonl") as url:
            address = f"{head.address}:6379"
            with ray_node(head, address, job_server=True):
                wait_for_port(office, f"{head.address}:8265")
                dashboard = f"http://{head.address}:8265"
                folder = tmp_path / "run"
                overrides = small_run(tinywiki, policy, url, folder, *CPU)[4:]
                sizes = {"N_NODES": "1", "N_GPUS": "1", "EXPERIMENT_NAME": "submitted"}
                where = {"RAY_DASHBOARD_ADDRESS": dashboard, "RAY_AUTH_MODE": "token"}
                submitted = office.run("bash", SCRIPT, *overrides, **sizes, **where)
                found = re.search(r"submitted as (\S+)\. What it prints: (.+)", submitted.stdout)
                assert found, submitted.stdout + submitted.stderr
                said = office.run("bash", "-c", found[2], RAY_AUTH_MODE="token").stdout
                assert "succeeded" in said, said
                assert list(metrics_by_step(folder)) == [1, 2], said
