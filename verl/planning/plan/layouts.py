"""The layouts that the planner tries: which nodes only sample, the copies of the model, what waits in host memory,
whether activations are recomputed, the micro-batches, and the GPUs of an engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from verl.config import Config
from verl.config.rules.placement import critic_gpus, num_ranks, placement_of
from verl.config.rules.predicates import largest_mini_batch, trajectories_per_step, window_of
from verl.engine.files.loading import ModelShape

TOKENS = (4, 2, 1)  # windows in a micro-batch, tried from the largest on
ACTOR, CRITIC, REFERENCE = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"
CHECKPOINTING = ("actor_rollout_ref.model.enable_gradient_checkpointing", "critic.model.enable_gradient_checkpointing")


@dataclass(frozen=True)
class Sharding:
    """The layout of the trained roles: `fsdp_size` ranks share a copy (-1: all), `offload` to host memory between
    phases, activations recomputed with `checkpointing`, `tokens` in a micro-batch of a rank. Of all nodes,
    `sampling_nodes` only sample; `critic` GPUs of each of the others are the critic's alone, as the user has set.
    `given`: the settings of the run as they are.
    """

    fsdp_size: int
    offload: bool
    checkpointing: bool
    tokens: int
    sampling_nodes: int = 0
    critic: int = 0
    given: bool = False

    @classmethod
    def of(cls, config: Config, given: bool = False) -> Sharding:
        """The sharding of a config, in which the user's settings override a plan's."""
        actor = config.actor_rollout_ref.actor
        checkpointing = config.actor_rollout_ref.model.enable_gradient_checkpointing
        sampling_nodes = config.actor_rollout_ref.rollout.nnodes
        fsdp = actor.fsdp_config
        tokens, critic = actor.ppo_max_token_len_per_gpu, critic_gpus(config)
        return cls(fsdp.fsdp_size, fsdp.param_offload, checkpointing, tokens, sampling_nodes, critic, given)

    @property
    def settings(self) -> list[str]:
        """As a command line takes them; none for the run as it is."""
        if self.given:
            return []
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
            *(f"{key}={str(self.checkpointing).lower()}" for key in CHECKPOINTING),
            f"{ACTOR}.use_dynamic_bsz=true",
            f"{ACTOR}.ppo_max_token_len_per_gpu={self.tokens}",
            f"{CRITIC}.ppo_max_token_len_per_gpu={self.tokens}",
            *(nodes if self.sampling_nodes else []),
            *([f"{CRITIC}.n_gpus_per_node={self.critic}"] if self.critic else []),
        ]

    def __str__(self) -> str:
        if self.given:
            return "as given"
        copies = "one copy" if self.fsdp_size == -1 else f"a copy on {self.fsdp_size}"
        nodes = f"{self.sampling_nodes} node{'s' * (self.sampling_nodes > 1)}"
        apart = f"{nodes} for sampling, " if self.sampling_nodes else ""
        apart += f"{self.critic} of a node for the critic, " if self.critic else ""
        offload = "offload" if self.offload else "no offload"
        activations = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{apart}{copies}, {offload}, {activations}, {self.tokens} tokens"


def shardings(config: Config) -> Iterator[list[Sharding]]:
    """The shardings to try, in families of which the first that fits is taken, from the largest micro-batches on. The
    first family is the run as it is. A family with off-loading follows the same one without.
    """
    yield [Sharding.of(config, given=True)]
    trainer, apart = config.trainer, config.actor_rollout_ref.rollout.nnodes
    own = trainer.layout == "split"  # the user has divided the devices
    offloading = (False,) if trainer.device == "cpu" else (False, True)
    for sampling_nodes in [apart] if own else sorted({0, trainer.nnodes // 2}):  # none alone, or half of the nodes
        training = trainer.nnodes if own else trainer.nnodes - sampling_nodes
        a_node = num_ranks(config, "actor") // trainer.nnodes
        # One copy of the model over all training ranks, or one on each node; on a single node both are the same.
        for size, checkpointing, offload in product([-1] if training == 1 else [-1, a_node], (False, True), offloading):
            yield [
                Sharding(size, offload, checkpointing, windows * window_of(config), sampling_nodes, critic_gpus(config))
                for windows in TOKENS
            ]


def least_bytes(config: Config, policy: ModelShape) -> float:
    """Bytes that an update of the actor takes on a GPU at the least, by what is certain to be there: a rank's part of
    the weights, gradients and two moments in float32, embedding, head and one layer gathered in bfloat16, and what a
    forward pass keeps in bfloat16 of each layer, with checkpointing its input, else the inputs of its products.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    # Here the parts below are not certain, so there is no bound.
    trains_a_part = policy.num_adapted or model.trained_layers is not None
    if trains_a_part or not actor.use_dynamic_bsz or config.trainer.device == "cpu":
        return 0.0
    # The tokens of a rank's largest micro-batch, and the ranks over which a copy of the model is cut.
    ranks, rows = num_ranks(config, "actor"), trajectories_per_step(config)
    shared = actor.ulysses_sequence_parallel_size
    a_rank = largest_mini_batch(rows, actor.ppo_mini_batch_size) // (ranks // shared) * window_of(config) // shared
    tokens = min(actor.ppo_max_token_len_per_gpu, a_rank)
    shard = ranks if actor.fsdp_config.fsdp_size == -1 else actor.fsdp_config.fsdp_size
    recomputed = model.enable_gradient_checkpointing
    # Values that a layer keeps of each token, and weights that are gathered at the same time.
    width = policy.hidden if recomputed else 4 * policy.hidden + 3 * policy.mlp
    gathered = policy.num_embeddings * policy.hidden + policy.num_looked_up
    gathered += (policy.num_params - gathered) // policy.num_layers
    # 4 numbers of 4 bytes for each weight of the shard; all else has 2 bytes a number.
    return 16 * policy.num_params / shard + 2 * gathered + 2 * policy.num_layers * tokens * width


def engine_sizes(config: Config, policy: ModelShape) -> list[int]:
    """The GPUs of an engine: powers of two that divide those of a node that sample, and the model's attention heads. On
    CPU an engine is one process.
    """
    if config.trainer.device == "cpu":
        return [1]
    sampling = placement_of(config, "cuda").sampling
    return [size for size in (1, 2, 4, 8, 16) if sampling % size == 0 and policy.num_heads % size == 0]
