"""GPUs by name, with the rates of their data sheets (dense arithmetic)."""

from __future__ import annotations

from dataclasses import dataclass

from verl.config import Config
from verl.config.rules.placement import RoleName, num_ranks

GIB = 2**30
BETWEEN_NODES = 50e9  # bytes a second of one GPU: a network card of 400 Gbit/s for each
NODE = 8  # GPUs


@dataclass(frozen=True)
class Gpu:
    """`size`: nominal, in GB; `memory`: as the driver reports it, in GiB; the rest is per second."""

    name: str
    size: int
    memory: float
    bf16_flops: float
    tf32_flops: float
    memory_bytes: float
    link_bytes: float  # in one direction, to the other GPUs of the node


GPUS = (
    Gpu("A100-40", 40, 39.4, 312e12, 156e12, 1.555e12, 300e9),
    Gpu("L40S", 48, 44.4, 362e12, 183e12, 0.864e12, 32e9),
    Gpu("A100", 80, 79.1, 312e12, 156e12, 2.039e12, 300e9),
    Gpu("H100", 80, 79.1, 989e12, 494e12, 3.35e12, 450e9),
    Gpu("H200", 141, 139.8, 989e12, 494e12, 4.8e12, 450e9),
    Gpu("B200", 180, 178.3, 2250e12, 1125e12, 7.7e12, 900e9),
)


@dataclass(frozen=True)
class Groups:
    """Which ranks communicate: `shard` ranks share a copy of a model, there are `replicas` copies, `per_node` ranks are
    on a node, and `sequence` ranks share each row.
    """

    shard: int
    replicas: int = 1
    per_node: int = NODE
    sequence: int = 1

    def of(self, collective: str) -> tuple[int, bool]:
        """Number of ranks in a collective of that kind, and whether they are all on one node."""
        if collective == "all-reduce" and self.replicas > 1:  # of gradients, between ranks that hold the same shard
            return self.replicas, self.shard * self.replicas <= self.per_node
        size = self.sequence if collective == "all-to-all" and self.sequence > 1 else self.shard
        return size, size <= self.per_node


def groups_of(config: Config, fsdp_size: int, role: RoleName = "actor") -> Groups:
    """The groups of a role with that `fsdp_size`."""
    ranks = num_ranks(config, role)
    shard = ranks if fsdp_size == -1 else fsdp_size
    settings = config.actor_rollout_ref.actor if role == "actor" else config.critic
    return Groups(shard, ranks // shard, ranks // config.trainer.nnodes, settings.ulysses_sequence_parallel_size)
