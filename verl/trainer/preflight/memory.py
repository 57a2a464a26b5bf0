"""Memory of each phase on one worker, from shapes and settings: an estimate before anything is loaded.

Of a trained model with P parameters over N workers: float32 weights 4P/N, two moments of AdamW 8P/N, gradients 4P/N
while an update lasts; an anchor 4P/N. What is gathered is in the format of the forward pass. A token keeps for the
backward pass, per layer of width H (queries Q, keys and values K each, MLP F): 6H + 2Q + 2K + 4F values in float32; in
bfloat16 the two norms keep a float32 copy, which makes it 8H. With gradient checkpointing it keeps H per layer, and all
of one layer at a time. The backward pass of a layer needs 2F more.

On CPU glibc keeps freed blocks in holes. How much more that takes was measured (tests/verl/trainer); on a GPU the
factor is an assumption about the caching allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl.config import Config
from verl.config.model import FrozenFsdpConfig, FsdpConfig
from verl.engine.head import CHUNKS, SMALLEST_CHUNK
from verl.engine.kl_objective import topk_of
from verl.trainer.preflight.shape import ModelShape

GIB = 2**30
FLOAT32 = 4
WORKER_BYTES = 37 * 2**20  # what the first update of a process on CPU imports and never gives back
CUDA_CONTEXT_BYTES = GIB // 2
CPU_HOLES, CPU_HOLES_CHECKPOINTED, GPU_HOLES = (
    1.55,
    2.05,
    1.1,
)  # allocated per byte that is used, of short-lived tensors
LARGEST_WARM_UP = 4 * GIB  # what a sampler needs beside weights and cache, for its largest iteration


@dataclass(frozen=True)
class Place:
    """Where a run is estimated: workers, bytes of one device, and whether it is a GPU."""

    workers: int
    device_bytes: int
    on_gpu: bool

    @property
    def value_bytes(self) -> int:
        """Of the forward pass."""
        return 2 if self.on_gpu else FLOAT32


@dataclass(frozen=True)
class Models:
    """Shapes of what a run loads; None for what it does not have."""

    policy: ModelShape
    anchor: ModelShape | None = None
    critic: ModelShape | None = None


@dataclass
class Phase:
    """Bytes on the worker's device by name; their sum is the phase's peak."""

    name: str
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def estimate(config: Config, models: Models, place: Place) -> list[Phase]:
    """The phases of a step. On CPU the sampler is a process of its own: its memory is in the phase `rollout` only."""
    resident = _resident(config, models, place)
    phases = [Phase("rollout", resident | _sampler(config, models.policy, place))]
    if place.on_gpu and config.trainer.nnodes == 1:  # elsewhere the weights go through a file
        whole = _sampler_width(config) * models.policy.num_params
        phases.append(Phase("weight sync", phases[0].parts | {"whole weights for the sampler": float(whole)}))
    phases.append(Phase("log-probs", resident | _log_probs(config, models, place)))
    phases.append(Phase("update", resident | update_parts(config, models, place)))
    if models.critic is not None:
        phases.append(Phase("critic update", resident | _critic_update(config, models.critic, place)))
    return phases


def actor_update(config: Config, models: Models, place: Place) -> float:
    """Peak bytes of the actor's process alone in an update."""
    alone = Models(models.policy, models.anchor)
    return sum((_resident(config, alone, place) | update_parts(config, alone, place)).values())


def _resident(config: Config, models: Models, place: Place) -> dict[str, float]:
    """What lies on the device through all phases."""
    actor, parts = config.actor_rollout_ref.actor, {"process": float(_process(place))}
    if not _off_loaded(actor.fsdp_config, place):
        parts["policy weights"] = FLOAT32 * models.policy.num_params / place.workers
        parts["policy optimizer"] = 2 * FLOAT32 * models.policy.num_params / place.workers
    if models.anchor is not None and not _off_loaded(config.actor_rollout_ref.ref.fsdp_config, place):
        parts["anchor weights"] = FLOAT32 * models.anchor.num_params / place.workers
    if models.critic is not None and not _off_loaded(config.critic.model.fsdp_config, place):
        parts["critic weights and optimizer"] = 3 * FLOAT32 * models.critic.num_params / place.workers
    if place.on_gpu and not config.actor_rollout_ref.rollout.free_cache_engine:
        parts |= _sampler(config, models.policy, place)
    return parts


def update_parts(config: Config, models: Models, place: Place) -> dict[str, float]:
    """What an update of the policy needs besides."""
    role = config.actor_rollout_ref
    actor, policy = role.actor, models.policy
    tokens = min(_pass_tokens(config, actor, place), _rank_tokens(config, actor.ppo_mini_batch_size, place))
    parts = _backward(policy, role.model.enable_gradient_checkpointing, actor.fsdp_config, tokens, place)
    parts["head"] = _head(policy, actor.head_chunk_tokens, tokens, place, copies=3, backward=True)
    if actor.use_kl_loss and topk_of(actor):
        parts["top-k tensors"] = float(tokens * topk_of(actor) * (8 + 3 * FLOAT32))
    if models.anchor is not None and actor.kl_loss_type.startswith("full") and actor.use_kl_loss:
        parts["anchor gathered"] = _gathered(models.anchor, place) + _head(
            models.anchor, actor.head_chunk_tokens, tokens, place, copies=2, backward=False
        )
    return parts


def _critic_update(config: Config, critic: ModelShape, place: Place) -> dict[str, float]:
    settings = config.critic
    tokens = min(_pass_tokens(config, settings, place), _rank_tokens(config, settings.ppo_mini_batch_size, place))
    model = settings.model
    return _backward(critic, model.enable_gradient_checkpointing, model.fsdp_config, tokens, place)


def _backward(shape: ModelShape, checkpointing: bool, fsdp: FsdpConfig, tokens: int, place: Place) -> dict[str, float]:
    gradient = FLOAT32 * shape.num_params / place.workers
    holes = GPU_HOLES if place.on_gpu else CPU_HOLES_CHECKPOINTED if checkpointing else CPU_HOLES
    parts = {"activations": holes * activation_bytes(shape, checkpointing, tokens, place.value_bytes)}
    if not _off_loaded(fsdp, place):
        parts["gradients"] = gradient
    if place.on_gpu:
        # A unit's gradient is summed over the workers in float32; the root's is the largest.
        parts["gathered weights"] = _gathered(shape, place)
        parts["gradients in reduction"] = FLOAT32 * max(shape.root_params, shape.layer_params)
    else:
        parts["gradients in reduction"] = holes * gradient
    return parts


def activation_bytes(shape: ModelShape, checkpointing: bool, tokens: int, value_bytes: int) -> int:
    """Kept by a forward pass over `tokens`, and used by the backward pass of one layer."""
    norms = (6 if value_bytes == FLOAT32 else 8) * shape.hidden
    layer = norms + 2 * shape.query_width + 2 * shape.key_width + 4 * shape.mlp
    kept = layer + (shape.num_layers + 1) * shape.hidden if checkpointing else layer * shape.num_layers
    return value_bytes * tokens * (kept + norms // 2 + 2 * shape.mlp)


def _head(shape: ModelShape, chunk_tokens: int | None, tokens: int, place: Place, copies: int, backward: bool) -> float:
    """Logits of a chunk in float32 and, where the model is in another format, float32 copies of the head."""
    chunk = min(tokens, chunk_tokens or max(SMALLEST_CHUNK, -(-tokens // CHUNKS)))
    weights = (1 if place.on_gpu else 0) + (1 if backward else 0)
    return float(FLOAT32 * (copies * chunk * shape.vocabulary + weights * shape.head_params))


def _log_probs(config: Config, models: Models, place: Place) -> dict[str, float]:
    role, policy = config.actor_rollout_ref, models.policy
    if role.rollout.log_prob_use_dynamic_bsz:
        budget = role.rollout.log_prob_max_token_len_per_gpu
    else:
        budget = max(1, role.rollout.log_prob_micro_batch_size // place.workers) * window_of(config)
    tokens = min(budget, _rank_tokens(config, num_trajectories(config), place))
    widest = 4 * policy.hidden + 2 * policy.query_width + 3 * policy.mlp  # of one layer: nothing is kept
    parts = {
        "forward": float(place.value_bytes * tokens * widest),
        "head": _head(policy, role.actor.head_chunk_tokens, tokens, place, copies=2, backward=False),
    }
    if place.on_gpu:
        parts["gathered weights"] = _gathered(policy, place)
    return parts


def _sampler(config: Config, policy: ModelShape, place: Place) -> dict[str, float]:
    """The whole of vLLM's share; `sampler_room` says whether that holds the weights and some cache."""
    rollout = config.actor_rollout_ref.rollout
    if place.on_gpu:
        return {"sampler": rollout.gpu_memory_utilization * place.device_bytes}
    return {
        "sampler weights": float(_sampler_width(config) * policy.num_params),
        "KV cache": rollout.kv_cache_gib * GIB,
    }


def kv_bytes_per_token(config: Config, policy: ModelShape) -> int:
    """Keys and values of one token in all layers, over all GPUs of an engine."""
    return 2 * policy.num_layers * policy.key_width * _sampler_width(config)


def kv_cache_tokens(config: Config, policy: ModelShape, place: Place) -> int:
    """Tokens that the cache of one engine holds; 0 or less: the sampler does not fit into its share."""
    rollout = config.actor_rollout_ref.rollout
    if not place.on_gpu:
        return int(rollout.kv_cache_gib * GIB // kv_bytes_per_token(config, policy))
    ranks = rollout.tensor_model_parallel_size
    width = _sampler_width(config)
    iteration = width * rollout.max_num_batched_tokens * (2 * policy.mlp // ranks + 4 * policy.hidden)
    room = rollout.gpu_memory_utilization * place.device_bytes - width * policy.num_params / ranks
    return int((room - min(iteration, LARGEST_WARM_UP)) * ranks // kv_bytes_per_token(config, policy))


def num_trajectories(config: Config) -> int:
    """Of a step."""
    rollout = config.actor_rollout_ref.rollout
    return config.data.train_batch_size * (rollout.n_agent if config.do_search else rollout.n)


def window_of(config: Config) -> int:
    """No sequence is longer, in tokens."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def _pass_tokens(config: Config, settings: object, place: Place) -> int:
    """Most tokens of a worker in one forward and backward pass, padding counted."""
    by_tokens: Mapping[str, int] = vars(settings)
    if by_tokens["use_dynamic_bsz"]:
        return by_tokens["ppo_max_token_len_per_gpu"]
    return max(1, by_tokens["ppo_micro_batch_size"] // place.workers) * window_of(config)


def _rank_tokens(config: Config, rows: int, place: Place) -> int:
    return -(-min(rows, num_trajectories(config)) // place.workers) * window_of(config)


def _gathered(shape: ModelShape, place: Place) -> float:
    """Root unit, the layer that works and the one that comes next; all layers when there is one worker."""
    layers = shape.num_layers if place.workers == 1 else min(2, shape.num_layers)
    return float(place.value_bytes * (shape.root_params + layers * shape.layer_params))


def _off_loaded(fsdp: FsdpConfig | FrozenFsdpConfig, place: Place) -> bool:
    offload = fsdp.param_offload or (isinstance(fsdp, FsdpConfig) and fsdp.optimizer_offload)
    return place.on_gpu and offload


def _sampler_width(config: Config) -> int:
    """Bytes of a weight; "auto" is the model's own format, of which the larger one is assumed."""
    return 2 if config.actor_rollout_ref.rollout.dtype in ("bfloat16", "float16") else FLOAT32


def _process(place: Place) -> int:
    return CUDA_CONTEXT_BYTES if place.on_gpu else WORKER_BYTES
