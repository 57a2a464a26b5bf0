"""How many devices sample and how many train, by the settings alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from verl.config.rules.predicates import estimator_traits
from verl.config.sections.schema import Config
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
CRITIC = "critic.n_gpus_per_node"
RoleName = Literal["actor", "critic"]
NO_SPLIT_ON_CPU = (
    "trainer.layout=split divides GPUs, but this run has none: leave it at colocated (engines on CPU are "
    f"processes beside those that train: {ROLLOUT}.num_engines), or give the engines whole nodes "
    f"({ROLLOUT}.nnodes)"
)


@dataclass(frozen=True)
class Placement:
    """How the devices of a run are divided. Of each of `nnodes` nodes the first `sampling` devices sample, the last
    `critic` ones are the critic's alone, and the `training` ones before those train the actor, and the critic where it
    has none of its own.

    Colocated roles take turns on all devices but the critic's own. With `sampling_nodes` those are nodes of their own,
    on which `sampling` devices sample. On CPU a device is a process, and engines are processes beside.
    """

    nnodes: int
    per_node: int
    sampling: int
    training: int
    gpus_per_engine: int
    num_engines: int
    sampling_nodes: int = 0
    critic: int = 0

    @property
    def colocated(self) -> bool:
        return self.training == self.per_node - self.critic and not self.sampling_nodes

    @property
    def first_training(self) -> int:
        """Device of a node where those that train begin."""
        return self.per_node - self.critic - self.training

    @property
    def engines_per_node(self) -> int:
        """Engines of a node that samples; on CPU the nodes need not have equally many."""
        return self.num_engines // (self.sampling_nodes or self.nnodes)

    @property
    def most_engines_on_a_node(self) -> int:
        """Engines of the node that has most. On CPU they fill the processes of one node after the other, in rounds."""
        if self.sampling_nodes:
            return self.engines_per_node
        rounds, rest = divmod(self.num_engines * self.gpus_per_engine, self.nnodes * self.sampling)
        return (rounds * self.sampling + min(rest, self.sampling)) // self.gpus_per_engine

    @property
    def num_ranks(self) -> int:
        """Ranks of the actor, and of a critic without devices of its own."""
        return self.nnodes * self.training

    @property
    def num_critic_ranks(self) -> int:
        """Ranks of a critic with devices of its own, else 0."""
        return self.nnodes * self.critic


def placement_of(config: Config, device: str) -> Placement:
    """The placement on "cpu" or "cuda". Raises ConfigError for a layout that a CPU machine does not have."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nnodes, per_node, sampling, critic = trainer.nnodes, trainer.n_gpus_per_node, _sampling(config), critic_gpus(config)
    if device == "cpu":
        if trainer.layout == "split" and not rollout.nnodes:
            raise ConfigError(NO_SPLIT_ON_CPU)
        beside = per_node if rollout.nnodes else per_node - critic
        return Placement(nnodes, per_node, beside, per_node - critic, 1, rollout.num_engines, rollout.nnodes, critic)
    ranks = rollout.tensor_model_parallel_size
    num_engines = (rollout.nnodes or nnodes) * sampling // ranks
    return Placement(nnodes, per_node, sampling, _training(config), ranks, num_engines, rollout.nnodes, critic)


def num_ranks(config: Config, role: RoleName) -> int:
    """Ranks of a trained role."""
    own = critic_gpus(config) if role == "critic" else 0
    return config.trainer.nnodes * (own or _training(config))


def critic_gpus(config: Config) -> int:
    """GPUs of a node that are the critic's alone; 0 where it shares the actor's, and in a run that only validates."""
    return 0 if config.trainer.val_only else config.critic.n_gpus_per_node or 0


def training_gpus(config: Config) -> int:
    """GPUs of a node that train the actor or the critic."""
    return _training(config) + critic_gpus(config)


def devices_of_nodes(config: Config) -> list[int]:
    """How many devices the run takes of each of its nodes."""
    trainer, sampling_nodes = config.trainer, config.actor_rollout_ref.rollout.nnodes
    return [trainer.n_gpus_per_node] * trainer.nnodes + [_sampling(config)] * sampling_nodes


def fits_on_nodes(config: Config, gpus: Sequence[int], reward_server: int) -> bool:
    """Whether nodes with so many `gpus` each have those of all roles, and beside them, on one node, `reward_server` for
    the reward's server.
    """
    needed, offered = sorted(devices_of_nodes(config), reverse=True), sorted(gpus, reverse=True)
    left = [has - need for has, need in zip_longest(offered, needed, fillvalue=0)]
    return len(offered) >= len(needed) and min(left) >= 0 and max(left) >= reward_server


def placement_problems(config: Config) -> Iterator[str]:
    """What the nodes cannot hold as it is configured, one message each."""
    rollout = config.actor_rollout_ref.rollout
    has_sampling_nodes = rollout.nnodes or rollout.n_gpus_per_node or rollout.max_nnodes
    problems = [*(_sampling_node_problems(config) if has_sampling_nodes else _split_problems(config))]
    if not problems:
        problems += _critic_problems(config)
    if not problems and config.trainer.device != "cpu":
        problems += _tensor_parallel_problems(config)
    yield from problems


def fewer_nodes_problems(config: Config) -> Iterator[str]:
    """What is wrong with the fewest nodes that a resumed run may have (`trainer.min_nnodes`)."""
    fewest, nnodes = config.trainer.min_nnodes, config.trainer.nnodes
    if fewest is not None and fewest > nnodes:
        yield f"trainer.min_nnodes={fewest} is more than trainer.nnodes={nnodes}: lower it, or leave it at null"


def _split_problems(config: Config) -> Iterator[str]:
    """What is wrong with the layout where all nodes are alike: each trains and samples."""
    trainer = config.trainer
    share, per_node = trainer.rollout_gpus_per_node, trainer.n_gpus_per_node
    if trainer.layout == "colocated" and share is not None:
        yield (
            f"trainer.rollout_gpus_per_node={share} has no effect with trainer.layout=colocated, where all GPUs "
            "sample: set trainer.layout=split, or leave it at null"
        )
    elif trainer.layout == "split" and trainer.device == "cpu":
        yield NO_SPLIT_ON_CPU
    elif trainer.layout == "split" and (share is None or share >= per_node):
        yield (
            f"trainer.layout=split with trainer.rollout_gpus_per_node={('null' if share is None else share)}: set "
            f"it to the number of GPUs per node that sample, fewer than the {per_node} of "
            f"trainer.n_gpus_per_node; the others train. Or set {ROLLOUT}.nnodes to a number of nodes that only "
            "sample"
        )


def _critic_problems(config: Config) -> Iterator[str]:
    """What is wrong with the critic's own GPUs, where nothing is wrong with the others."""
    trainer, critic = config.trainer, config.critic.n_gpus_per_node
    if critic is None:
        return
    if not estimator_traits(config).needs_critic:
        yield (
            f"{CRITIC}={critic} has no effect with algorithm.adv_estimator={config.algorithm.adv_estimator}, which has "
            "no critic: leave it at null"
        )
    elif _training(config) < 1:
        share = trainer.rollout_gpus_per_node
        taken = f"{CRITIC}={critic}" + (f" and trainer.rollout_gpus_per_node={share}" if share else "")
        yield (
            f"{taken} leave no GPU for the actor out of the {trainer.n_gpus_per_node} of trainer.n_gpus_per_node, "
            "which counts those of all roles: raise that, or lower the others"
        )


def _sampling_node_problems(config: Config) -> Iterator[str]:
    """What is wrong with the nodes that only sample."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nnodes, most = rollout.nnodes, rollout.max_nnodes
    if not nnodes:
        yield (
            f"{ROLLOUT}.n_gpus_per_node and {ROLLOUT}.max_nnodes are for nodes that only sample, but "
            f"{ROLLOUT}.nnodes=0: set it to their number, or leave the two at null"
        )
        return
    if trainer.layout == "colocated":
        yield (
            f"{ROLLOUT}.nnodes={nnodes} nodes would only sample, but with trainer.layout=colocated all nodes "
            "train and sample: set trainer.layout=split, or leave it at 0"
        )
    if trainer.rollout_gpus_per_node is not None:
        yield (
            f"trainer.rollout_gpus_per_node={trainer.rollout_gpus_per_node} divides each node, and {ROLLOUT}.nnodes="
            f"{nnodes} adds nodes that only sample: leave the first at null, or the second at 0"
        )
    if most is not None and most < nnodes:
        yield f"{ROLLOUT}.max_nnodes={most} is fewer than {ROLLOUT}.nnodes={nnodes}"
    if trainer.device == "cpu" and rollout.num_engines % nnodes:
        yield f"{ROLLOUT}.num_engines={rollout.num_engines} cannot be divided equally by {ROLLOUT}.nnodes={nnodes}"


def _tensor_parallel_problems(config: Config) -> Iterator[str]:
    """What is wrong with tensor parallelism on GPUs; on CPU an engine is one process, whatever this key says."""
    ranks, sampling = config.actor_rollout_ref.rollout.tensor_model_parallel_size, _sampling(config)
    if sampling % ranks:
        yield (
            f"{TENSOR_PARALLEL} ({ranks}) must divide the number of GPUs per node that sample ({sampling}): the "
            "ranks of an engine are processes of one node, because they exchange activations in every layer; "
            "tensor parallelism across nodes is not available. Set it to a divisor, or to 1 for one engine per "
            "GPU"
        )


def _sampling(config: Config) -> int:
    """GPUs of a node that samples."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if rollout.nnodes:
        return rollout.n_gpus_per_node or trainer.n_gpus_per_node
    return trainer.rollout_gpus_per_node or trainer.n_gpus_per_node - critic_gpus(config)


def _training(config: Config) -> int:
    """GPUs of a node that train the actor."""
    divided = config.trainer.layout == "split" and not config.actor_rollout_ref.rollout.nnodes
    return config.trainer.n_gpus_per_node - critic_gpus(config) - (_sampling(config) if divided else 0)
