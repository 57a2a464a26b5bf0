"""Who sits where, as the start of a run tells it."""

from __future__ import annotations

from dataclasses import replace

from run_config import run_config

from verl.config.rules.placement import placement_of
from verl.single_controller import Node
from verl.trainer.layout import layout_table

ROLLOUT = "actor_rollout_ref.rollout"


def test_a_critic_on_gpus_of_its_own() -> None:
    critic = ("critic.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1")
    split = (*critic, "trainer.layout=split", "trainer.rollout_gpus_per_node=1", "trainer.n_gpus_per_node=4")
    config = run_config(["actor_rollout_ref.model.path=m", "trainer.nnodes=2", *split])
    nodes = [Node(f"192.0.2.{number}", ("4", "5", "6", "7")) for number in (1, 2)]
    place = placement_of(config, "cuda")
    title, columns, _, second = layout_table(place, nodes).splitlines()
    assert title == "layout split: 4 ranks of the actor, 2 of the critic and 2 engines of 1 GPU on 2 nodes"
    assert columns.split() == ["node", "actor", "on", "GPUs", "critic", "on", "GPUs", "sample", "on", "GPUs"]
    assert second.split() == ["192.0.2.2", "ranks", "2-3", "5,6", "rank", "1", "7", "engine", "1", "4"]
    apart = layout_table(replace(place, sampling_nodes=1, num_engines=1), nodes[:1], nodes[1:]).splitlines()
    assert apart[3].split() == ["192.0.2.2", "engine", "0", "4"]
    assert apart[3].index("engine") == apart[1].index("sample"), "where the engines of the others would stand"


def test_a_critic_of_its_own_on_cpu() -> None:
    cpu = ("trainer.device=cpu", "trainer.n_gpus_per_node=2", "critic.n_gpus_per_node=1")
    place = placement_of(run_config(["actor_rollout_ref.model.path=m", *cpu]), "cpu")
    assert layout_table(place, []) == "layout: 1 rank of the actor, 1 of the critic and 1 engine on CPU"


def test_nodes_that_train_beside_nodes_that_sample() -> None:
    settings = ("trainer.layout=split", "trainer.nnodes=2", f"{ROLLOUT}.nnodes=10", f"{ROLLOUT}.n_gpus_per_node=4")
    config = run_config(["actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=2", *settings])
    trainers = [Node(f"192.0.2.{number}", ("0", "1")) for number in (1, 2)]
    samplers = [Node(f"192.0.2.{number}", ("0", "1", "2", "3")) for number in range(11, 21)]
    lines = [line.split() for line in layout_table(placement_of(config, "cuda"), trainers, samplers).splitlines()]
    assert " ".join(lines[0]) == "layout split: 4 training ranks and 20 engines of 2 GPUs on 2 nodes and 10 nodes"
    assert lines[2:4] == [["192.0.2.1", "ranks", "0-1", "0,1"], ["192.0.2.2", "ranks", "2-3", "0,1"]]
    assert lines[4] == ["192.0.2.11", "engines", "0-1", "0,1,2,3"]
    assert lines[11] == ["192.0.2.18", "engines", "14-15", "0,1,2,3"]
    assert " ".join(lines[12]) == "... and 2 nodes more like 192.0.2.11"
