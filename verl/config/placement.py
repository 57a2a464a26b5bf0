"""How many devices sample and how many train, by the settings alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config.schema import Config
from verl.errors import ConfigError

TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
NO_SPLIT_ON_CPU = (
    "trainer.layout=split divides GPUs, and this run has none: leave it at colocated "
    "(engines on CPU are processes beside those that train: actor_rollout_ref.rollout.num_engines)"
)


@dataclass(frozen=True)
class Placement:
    """Of each of `nnodes` nodes the last `training` devices train and the first `sampling` ones sample.

    Colocated roles take turns on all devices of a node. On CPU a device is a process, and engines are processes beside.
    """

    nnodes: int
    per_node: int
    sampling: int
    training: int
    gpus_per_engine: int
    num_engines: int

    @property
    def colocated(self) -> bool:
        return self.training == self.per_node

    @property
    def num_ranks(self) -> int:
        """Ranks of each trained role."""
        return self.nnodes * self.training


def placement_of(config: Config, device: str) -> Placement:
    """On "cpu" or "cuda". Raises ConfigError for a layout that a CPU machine does not have."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    nnodes, per_node, sampling = trainer.nnodes, trainer.n_gpus_per_node, _sampling(config)
    if device == "cpu":
        if trainer.layout == "split":
            raise ConfigError(NO_SPLIT_ON_CPU)
        return Placement(nnodes, per_node, per_node, per_node, 1, rollout.num_engines)
    ranks = rollout.tensor_model_parallel_size
    return Placement(nnodes, per_node, sampling, _training(config), ranks, nnodes * sampling // ranks)


def num_ranks(config: Config) -> int:
    """Ranks of each trained role."""
    return config.trainer.nnodes * _training(config)


def placement_problems(config: Config) -> Iterator[str]:
    """What cannot be placed, one message each."""
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
            f"the GPUs of a node that sample, fewer than the {per_node} of trainer.n_gpus_per_node; the others train"
        )
    elif trainer.device != "cpu":
        yield from _tensor_parallel_problems(config)


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
    """GPUs of a node."""
    return config.trainer.rollout_gpus_per_node or config.trainer.n_gpus_per_node


def _training(config: Config) -> int:
    """GPUs of a node."""
    return config.trainer.n_gpus_per_node - (_sampling(config) if config.trainer.layout == "split" else 0)
