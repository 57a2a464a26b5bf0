"""Who sits where, as the start of a run tells it."""

from __future__ import annotations

from verl.config import load_config
from verl.config.placement import placement_of
from verl.single_controller import Node
from verl.trainer.layout import layout_table

ROLLOUT = "actor_rollout_ref.rollout"


def test_nodes_that_train_beside_nodes_that_sample() -> None:
    settings = ("trainer.layout=split", "trainer.nnodes=2", f"{ROLLOUT}.nnodes=10", f"{ROLLOUT}.n_gpus_per_node=4")
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", "trainer.n_gpus_per_node=2", *settings])
    trainers = [Node(f"192.0.2.{number}", ("0", "1")) for number in (1, 2)]
    samplers = [Node(f"192.0.2.{number}", ("0", "1", "2", "3")) for number in range(11, 21)]
    lines = [line.split() for line in layout_table(placement_of(config, "cuda"), trainers, samplers).splitlines()]
    assert " ".join(lines[0]) == "layout split: 4 training ranks and 20 engines of 2 GPUs on 2 nodes and 10 nodes"
    assert lines[2:4] == [["192.0.2.1", "ranks", "0-1", "0,1"], ["192.0.2.2", "ranks", "2-3", "0,1"]]
    assert lines[4] == ["192.0.2.11", "engines", "0-1", "0,1,2,3"]
    assert lines[11] == ["192.0.2.18", "engines", "14-15", "0,1,2,3"]
    assert " ".join(lines[12]) == "... and 2 nodes more like 192.0.2.11"
