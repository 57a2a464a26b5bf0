"""How many engines and ranks there are, by the settings alone."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.config.placement import Placement, num_ranks, placement_of
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
SPLIT = ("trainer.layout=split", "trainer.rollout_gpus_per_node=2")


def placement(device: str, *overrides: str) -> Placement:
    return placement_of(load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", *overrides]), device)


@pytest.mark.parametrize(("ranks", "engines"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_every_size_of_an_engine_that_divides_a_node(ranks: int, engines: int) -> None:
    one, three = placement("cuda", f"{TP}={ranks}"), placement("cuda", f"{TP}={ranks}", "trainer.nnodes=3")
    assert (one.num_engines, one.num_ranks, one.colocated) == (engines, 8, True)
    assert (three.num_engines, three.num_ranks) == (3 * engines, 24)


def test_split_gpus_train_or_sample() -> None:
    place = placement("cuda", *SPLIT, "trainer.nnodes=2", f"{TP}=1")
    assert (place.num_engines, place.num_ranks, place.sampling, place.training) == (4, 12, 2, 6)
    assert not place.colocated
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=m", *SPLIT, f"{TP}=1"])
    assert num_ranks(config) == 6


def test_whole_nodes_that_only_sample() -> None:
    nodes = (f"{ROLLOUT}.nnodes=2", "trainer.layout=split", "trainer.nnodes=3")
    place = placement("cuda", *nodes, f"{TP}=4", f"{ROLLOUT}.n_gpus_per_node=4")
    assert (place.num_ranks, place.training, place.num_engines, place.engines_per_node) == (24, 8, 2, 1)
    assert not place.colocated
    place = placement("cuda", *nodes, f"{TP}=4")
    assert (place.num_ranks, place.num_engines, place.engines_per_node) == (24, 4, 2)
    place = placement("cpu", *nodes, "trainer.device=cpu", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_engines=4")
    assert (place.num_ranks, place.num_engines, place.engines_per_node, place.sampling_nodes) == (3, 4, 2, 2)


def test_on_cpu_an_engine_is_one_process_beside_the_ranks() -> None:
    many = f"{ROLLOUT}.num_engines=3"
    place = placement("cpu", "trainer.device=cpu", "trainer.n_gpus_per_node=2", many)
    assert (place.num_engines, place.num_ranks, place.gpus_per_engine) == (3, 2, 1)
    with pytest.raises(ConfigError, match="this run has none"):
        placement("cpu", *SPLIT)  # device=auto, and no GPU was found
