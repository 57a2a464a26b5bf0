"""The layouts that a plan tries: engines, copies of the model, what waits in host memory, and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import Config
from verl.config.counts import window_of
from verl.config.placement import placement_of

TOKENS = (4, 2, 1)  # windows in a micro-batch, tried from the largest on
ACTOR, CRITIC, REFERENCE = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"


@dataclass(frozen=True)
class Sharding:
    """How the trained roles lie: `fsdp_size` ranks share a copy (-1: all), `offload` to host memory between phases,
    `tokens` in a micro-batch of a rank.
    """

    fsdp_size: int
    offload: bool
    tokens: int

    @classmethod
    def of(cls, config: Config) -> Sharding:
        """What a run has, where the user's settings have won over a plan's."""
        actor = config.actor_rollout_ref.actor
        return cls(actor.fsdp_config.fsdp_size, actor.fsdp_config.param_offload, actor.ppo_max_token_len_per_gpu)

    @property
    def settings(self) -> list[str]:
        offload = str(self.offload).lower()
        return [
            f"{ACTOR}.fsdp_config.fsdp_size={self.fsdp_size}",
            f"{CRITIC}.model.fsdp_config.fsdp_size={self.fsdp_size}",
            *(f"{ACTOR}.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            *(f"{CRITIC}.model.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            f"{REFERENCE}.fsdp_config.param_offload={offload}",
            f"{ACTOR}.use_dynamic_bsz=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu={self.tokens}",
            f"{CRITIC}.ppo_max_token_len_per_gpu={self.tokens}",
        ]

    def __str__(self) -> str:
        copies = "one copy" if self.fsdp_size == -1 else f"a copy on {self.fsdp_size}"
        return f"{copies}, {'offload' if self.offload else 'no offload'}, {self.tokens} tokens"


def shardings(config: Config) -> Iterator[list[Sharding]]:
    """Families: of each, the first that fits is taken. Offloading costs time, so it comes after all without."""
    sizes = [-1] if config.trainer.nnodes == 1 else [-1, config.trainer.n_gpus_per_node]
    for size in sizes:
        yield [Sharding(size, offload, windows * window_of(config)) for offload in (False, True) for windows in TOKENS]


def engine_sizes(config: Config) -> list[int]:
    """GPUs of an engine: powers of two that divide those of a node which sample."""
    sampling = placement_of(config, "cuda").sampling
    return [size for size in (1, 2, 4, 8, 16) if sampling % size == 0]
