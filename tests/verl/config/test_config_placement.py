"""How many engines and ranks there are, by the settings alone."""

from __future__ import annotations

import pytest
from run_config import run_config

from verl.config import check_supported
from verl.config.rules.placement import Placement, num_ranks, placement_of
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TP = f"{ROLLOUT}.tensor_model_parallel_size"
CRITIC = "critic.n_gpus_per_node=2"
SPLIT = ("trainer.layout=split", "trainer.rollout_gpus_per_node=2")


def placement(device: str, *overrides: str) -> Placement:
    return placement_of(run_config(["actor_rollout_ref.model.path=m", *overrides]), device)


@pytest.mark.parametrize(("ranks", "engines"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_every_size_of_an_engine_that_divides_a_node(ranks: int, engines: int) -> None:
    one, three = placement("cuda", f"{TP}={ranks}"), placement("cuda", f"{TP}={ranks}", "trainer.nnodes=3")
    assert (one.num_engines, one.num_ranks, one.colocated) == (engines, 8, True)
    assert (three.num_engines, three.num_ranks) == (3 * engines, 24)


def test_split_gpus_train_or_sample() -> None:
    place = placement("cuda", *SPLIT, "trainer.nnodes=2", f"{TP}=1")
    assert (place.num_engines, place.num_ranks, place.sampling, place.training) == (4, 12, 2, 6)
    assert not place.colocated
    config = run_config(["actor_rollout_ref.model.path=m", *SPLIT, f"{TP}=1"])
    assert num_ranks(config, "actor") == num_ranks(config, "critic") == 6


def test_whole_nodes_that_only_sample() -> None:
    nodes = (f"{ROLLOUT}.nnodes=2", "trainer.layout=split", "trainer.nnodes=3")
    place = placement("cuda", *nodes, f"{TP}=4", f"{ROLLOUT}.n_gpus_per_node=4")
    assert (place.num_ranks, place.training, place.num_engines, place.engines_per_node) == (24, 8, 2, 1)
    assert not place.colocated
    place = placement("cuda", *nodes, f"{TP}=4")
    assert (place.num_ranks, place.num_engines, place.engines_per_node) == (24, 4, 2)
    place = placement("cpu", *nodes, "trainer.device=cpu", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.num_engines=4")
    assert (place.num_ranks, place.num_engines, place.engines_per_node, place.sampling_nodes) == (3, 4, 2, 2)


@pytest.mark.parametrize(
    ("layout", "sampling", "first", "training"),
    [((), 6, 0, 6), (SPLIT, 2, 2, 4), (("trainer.layout=split", f"{ROLLOUT}.nnodes=1"), 8, 0, 6)],
)
def test_a_critic_with_gpus_of_its_own(layout: tuple[str, ...], sampling: int, first: int, training: int) -> None:
    """Of eight GPUs the last two; engines take turns with the actor alone, and sampling nodes are not divided."""
    settings = (*layout, "trainer.nnodes=2", f"{TP}=1", CRITIC)
    place = placement("cuda", *settings)
    assert (place.sampling, place.first_training, place.training, place.critic) == (sampling, first, training, 2)
    assert (place.num_ranks, place.num_critic_ranks, place.colocated) == (2 * training, 4, not layout)
    assert place.num_engines == place.engines_per_node * (1 if place.sampling_nodes else 2)
    config = run_config(["actor_rollout_ref.model.path=m", *settings])
    assert (num_ranks(config, "actor"), num_ranks(config, "critic")) == (2 * training, 4)


def test_a_run_that_only_validates_has_no_critic() -> None:
    place = placement("cuda", CRITIC, f"{TP}=1", "trainer.val_only=true")
    assert (place.sampling, place.training, place.critic) == (8, 8, 0)


def test_a_critic_of_its_own_on_cpu_is_a_process_of_the_node() -> None:
    place = placement("cpu", "trainer.device=cpu", "trainer.n_gpus_per_node=3", CRITIC, f"{ROLLOUT}.num_engines=2")
    assert (place.num_ranks, place.num_critic_ranks, place.num_engines, place.sampling) == (1, 2, 2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("trainer.n_gpus_per_node=2",), "critic.n_gpus_per_node=2 leave no GPU for the actor out of the 2 of"),
        (
            ("trainer.layout=split", "trainer.rollout_gpus_per_node=6"),
            "critic.n_gpus_per_node=2 and trainer.rollout_gpus_per_node=6 leave no GPU for the actor out of the 8",
        ),
        (
            ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n_agent=2"),
            "critic.n_gpus_per_node=2 has no effect with algorithm.adv_estimator=grpo, which has no critic: leave it",
        ),
        ((f"{TP}=4",), r"must divide the number of GPUs per node that sample \(6\)"),
    ],
)
def test_a_critic_that_has_no_place(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placement("cuda", CRITIC, *settings)


def test_copies_of_a_critic_of_its_own_are_counted_in_its_own_workers() -> None:
    copies = ("actor_rollout_ref.actor.fsdp_config.fsdp_size=6", "critic.model.fsdp_config.fsdp_size=2")
    settings = ["actor_rollout_ref.model.path=m", "trainer.nnodes=2", f"{TP}=1", CRITIC]
    check_supported(run_config([*settings, *copies]))
    wrong = "critic.model.fsdp_config.fsdp_size=6"
    with pytest.raises(ConfigError, match=f"{wrong} does not divide the 4 workers that train the critic: set it to 2,"):
        check_supported(run_config([*settings, wrong]))


def test_on_cpu_an_engine_is_one_process_beside_the_ranks() -> None:
    many = f"{ROLLOUT}.num_engines=3"
    place = placement("cpu", "trainer.device=cpu", "trainer.n_gpus_per_node=2", many)
    assert (place.num_engines, place.num_ranks, place.gpus_per_engine) == (3, 2, 1)
    with pytest.raises(ConfigError, match="this run has none"):
        placement("cpu", *SPLIT)  # device=auto, and no GPU was found
