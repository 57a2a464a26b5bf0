"""The layouts that a plan tries: nodes that only sample, engines, copies of the model, what waits in host memory, and
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import Config
from verl.config.rules.placement import critic_gpus, num_ranks, placement_of
from verl.config.rules.predicates import window_of

TOKENS = (4, 2, 1)  # windows in a micro-batch, tried from the largest on
ACTOR, CRITIC, REFERENCE = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"


@dataclass(frozen=True)
class Sharding:
    """The layout of the trained roles: `fsdp_size` ranks share a copy (-1: all), `offload` to host memory between
    phases, `tokens` in a micro-batch of a rank. Of all nodes, `sampling_nodes` only sample; `critic` GPUs of each of
    the others are the critic's alone, as the user has set.
    """

    fsdp_size: int
    offload: bool
    tokens: int
    sampling_nodes: int = 0
    critic: int = 0

    @classmethod
    def of(cls, config: Config) -> Sharding:
        """The sharding of a config, in which the user's settings override a plan's."""
        actor = config.actor_rollout_ref.actor
        sampling_nodes = config.actor_rollout_ref.rollout.nnodes
        fsdp = actor.fsdp_config
        tokens = actor.ppo_max_token_len_per_gpu
        return cls(fsdp.fsdp_size, fsdp.param_offload, tokens, sampling_nodes, critic_gpus(config))

    @property
    def settings(self) -> list[str]:
        offload = str(self.offload).lower()
        # Where the actor has a copy on each node, the critic has one on its own GPUs of each.
        critic_fsdp_size = self.critic if self.critic and self.fsdp_size != -1 else self.fsdp_size
        nodes = ["trainer.layout=split", f"actor_rollout_ref.rollout.nnodes={self.sampling_nodes}"]
        return [
            f"{ACTOR}.fsdp_config.fsdp_size={self.fsdp_size}",
            f"{CRITIC}.model.fsdp_config.fsdp_size={critic_fsdp_size}",
            *(f"{ACTOR}.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            *(f"{CRITIC}.model.fsdp_config.{part}_offload={offload}" for part in ("param", "optimizer")),
            f"{REFERENCE}.fsdp_config.param_offload={offload}",
            f"{ACTOR}.use_dynamic_bsz=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu={self.tokens}",
            f"{CRITIC}.ppo_max_token_len_per_gpu={self.tokens}",
            *(nodes if self.sampling_nodes else []),
            *([f"{CRITIC}.n_gpus_per_node={self.critic}"] if self.critic else []),
        ]

    def __str__(self) -> str:
        copies = "one copy" if self.fsdp_size == -1 else f"a copy on {self.fsdp_size}"
        nodes = f"{self.sampling_nodes} node{'s' * (self.sampling_nodes > 1)}"
        apart = f"{nodes} for sampling, " if self.sampling_nodes else ""
        apart += f"{self.critic} of a node for the critic, " if self.critic else ""
        return f"{apart}{copies}, {'offload' if self.offload else 'no offload'}, {self.tokens} tokens"


def shardings(config: Config) -> Iterator[list[Sharding]]:
    """The shardings to try, in families of which the first that fits is taken. Offloading costs time: it comes last."""
    trainer, apart = config.trainer, config.actor_rollout_ref.rollout.nnodes
    own = trainer.layout == "split"  # the user has divided the devices
    for sampling_nodes in [apart] if own else sorted({0, trainer.nnodes // 2}):  # none alone, or half of the nodes
        training = trainer.nnodes if own else trainer.nnodes - sampling_nodes
        a_node = num_ranks(config, "actor") // trainer.nnodes
        for size in [-1] if training == 1 else [-1, a_node]:
            yield [
                Sharding(size, offload, windows * window_of(config), sampling_nodes, critic_gpus(config))
                for offload in ((False,) if trainer.device == "cpu" else (False, True))
                for windows in TOKENS
            ]


def engine_sizes(config: Config) -> list[int]:
    """The GPUs of an engine: powers of two that divide those of a node that sample. On CPU an engine is one process."""
    if config.trainer.device == "cpu":
        return [1]
    sampling = placement_of(config, "cuda").sampling
    return [size for size in (1, 2, 4, 8, 16) if sampling % size == 0]
