"""How many devices sample and how many train, by the settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.schema import Config
from verl.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
NO_SPLIT_ON_CPU = (
    "trainer.layout=split divides GPUs, and this run has none: leave it at colocated "
    f"(engines on CPU are processes beside those that train: {ROLLOUT}.num_engines), or give the engines whole nodes "
    f"({ROLLOUT}.nnodes)"
)


@dataclass(frozen=True)
class Placement:
    """Of each of `nnodes` nodes the last `training` devices train and the first `sampling` ones sample.

    Colocated roles take turns on all devices of a node. With `sampling_nodes` those are nodes of their own, on which
    `sampling` devices sample. On CPU a device is a process, and engines are processes beside.
    """

    nnodes: int
    per_node: int
    sampling: int
    training: int
    gpus_per_engine: int
    num_engines: int
    sampling_nodes: int = 0

    @property
    def colocated(self) -> bool:
        return self.training == self.per_node and not self.sampling_nodes

    @property
    def engines_per_node(self) -> int:
        """Of a node that samples; on CPU they need not be equally many."""
        return self.num_engines // (self.sampling_nodes or self.nnodes)

    @property
    def num_ranks(self) -> int:
        """Ranks of each trained role."""
        return self.nnodes * self.training


def placement_of(config: Config, device: str) -> Placement:
    """On "cpu" or "cuda". Raises ConfigError for a layout that a CPU machine does not have."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nnodes, per_node, sampling = trainer.nnodes, trainer.n_gpus_per_node, _sampling(config)
    if device == "cpu":
        if trainer.layout == "split" and not rollout.nnodes:
            raise ConfigError(NO_SPLIT_ON_CPU)
        return Placement(nnodes, per_node, per_node, per_node, 1, rollout.num_engines, rollout.nnodes)
    ranks = rollout.tensor_model_parallel_size
    num_engines = (rollout.nnodes or nnodes) * sampling // ranks
    return Placement(nnodes, per_node, sampling, _training(config), ranks, num_engines, rollout.nnodes)


def num_ranks(config: Config) -> int:
    """Ranks of each trained role."""
    return config.trainer.nnodes * _training(config)


def devices_of_nodes(config: Config) -> list[int]:
    """How many the run takes of each of its nodes."""
    trainer, sampling_nodes = config.trainer, config.actor_rollout_ref.rollout.nnodes
    return [trainer.n_gpus_per_node] * trainer.nnodes + [_sampling(config)] * sampling_nodes


def placement_problems(config: Config) -> Iterator[str]:
    """What cannot be placed, one message each."""
    problems = [*(_sampling_node_problems(config) if _sampling_nodes_are_set(config) else _split_problems(config))]
    if not problems and config.trainer.device != "cpu":
        problems += _tensor_parallel_problems(config)
    yield from problems


def fewer_nodes_problems(config: Config) -> Iterator[str]:
    """Of what is left of the nodes."""
    fewest, nnodes = config.trainer.min_nnodes, config.trainer.nnodes
    if fewest is not None and fewest > nnodes:
        yield f"trainer.min_nnodes={fewest} is more than trainer.nnodes={nnodes}: lower it, or leave it at null"


def _sampling_nodes_are_set(config: Config) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return bool(rollout.nnodes or rollout.n_gpus_per_node or rollout.max_nnodes)


def _split_problems(config: Config) -> Iterator[str]:
    """Of nodes that are all alike."""
    trainer = config.trainer
    share, per_node = trainer.rollout_gpus_per_node, trainer.n_gpus_per_node
    if trainer.layout == "colocated" and share is not None:
        yield (
            f"trainer.rollout_gpus_per_node={share} has no effect with trainer.layout=colocated, where all sample: set "
            "trainer.layout=split, or leave it at null"
        )
    elif trainer.layout == "split" and trainer.device == "cpu":
        yield NO_SPLIT_ON_CPU
    elif trainer.layout == "split" and (share is None or share >= per_node):
        yield (
            f"trainer.layout=split with trainer.rollout_gpus_per_node={'null' if share is None else share}: set it to "
            f"the GPUs of a node that sample, fewer than the {per_node} of trainer.n_gpus_per_node; the others train. "
            f"Or set {ROLLOUT}.nnodes to a number of nodes that only sample"
        )


def _sampling_node_problems(config: Config) -> Iterator[str]:
    """Of nodes that only sample."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nnodes, most = rollout.nnodes, rollout.max_nnodes
    if not nnodes:
        yield (
            f"{ROLLOUT}.n_gpus_per_node and {ROLLOUT}.max_nnodes are about nodes that only sample, and "
            f"{ROLLOUT}.nnodes=0: set it to how many there are, or leave the two at null"
        )
        return
    if trainer.layout == "colocated":
        yield (
            f"{ROLLOUT}.nnodes={nnodes} nodes would only sample, but with trainer.layout=colocated those that train "
            "sample too: set trainer.layout=split, or leave it at 0"
        )
    if trainer.rollout_gpus_per_node is not None:
        yield (
            f"trainer.rollout_gpus_per_node={trainer.rollout_gpus_per_node} divides each node, and {ROLLOUT}.nnodes="
            f"{nnodes} adds nodes that only sample: leave the first at null, or the second at 0"
        )
    if most is not None and most < nnodes:
        yield f"{ROLLOUT}.max_nnodes={most} is fewer than {ROLLOUT}.nnodes={nnodes}"
    if trainer.device == "cpu" and rollout.num_engines % nnodes:
        yield f"{ROLLOUT}.num_engines={rollout.num_engines} cannot be shared equally by {ROLLOUT}.nnodes={nnodes}"


def _tensor_parallel_problems(config: Config) -> Iterator[str]:
    """On CPU an engine is one process, whatever this key says."""
    ranks, sampling = config.actor_rollout_ref.rollout.tensor_model_parallel_size, _sampling(config)
    if sampling % ranks:
        yield (
            f"{TENSOR_PARALLEL} ({ranks}) must divide the GPUs of one node that sample ({sampling}): the ranks of an "
            "engine are processes of one node, as they exchange activations in every layer; tensor parallelism over "
            "nodes is not available. Set it to a divisor, 1 for one engine per GPU"
        )


def _sampling(config: Config) -> int:
    """GPUs of a node that samples."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    own = rollout.n_gpus_per_node if rollout.nnodes else trainer.rollout_gpus_per_node
    return own or trainer.n_gpus_per_node


def _training(config: Config) -> int:
    """GPUs of a node that trains."""
    divided = config.trainer.layout == "split" and not config.actor_rollout_ref.rollout.nnodes
    return config.trainer.n_gpus_per_node - (_sampling(config) if divided else 0)
