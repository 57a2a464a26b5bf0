"""Memory of forward and backward passes on one worker, in bytes by name.

A token keeps for the backward pass, per layer of width H (queries Q, keys and values K each, MLP F): 6H + 2Q + 2K + 4F
values in float32; in bfloat16 the two norms keep a float32 copy, which makes it 8H. With gradient checkpointing it
keeps H per layer, and all of one layer at a time. The backward pass of a layer needs 2F more.

On CPU glibc keeps freed blocks in holes. How much more that takes was measured (tests/verl/trainer); on a GPU the
factor is an assumption about the caching allocator.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl.config import ActorConfig, Config
from verl.config.counts import largest_mini_batch, trajectories_per_step
from verl.engine.head import default_chunk
from verl.engine.kl_objective import topk_of
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.quantities import FLOAT32, Place, window_of
from verl.trainer.preflight.shape import ModelShape

# Allocated per byte that is used, of short-lived tensors.
CPU_HOLES, CPU_HOLES_CHECKPOINTED, GPU_HOLES = 1.55, 2.05, 1.1


def log_probs(config: Config, models: Models, place: Place) -> dict[str, float]:
    """Of the policy's log-probs."""
    role, policy = config.actor_rollout_ref, models.policy
    if role.rollout.log_prob_use_dynamic_bsz:
        budget = role.rollout.log_prob_max_token_len_per_gpu
    else:
        budget = max(1, role.rollout.log_prob_micro_batch_size // place.workers) * window_of(config)
    tokens = min(budget, _rank_tokens(config, trajectories_per_step(config), place))
    widest = 4 * policy.hidden + 2 * policy.query_width + 3 * policy.mlp  # of one layer: nothing is kept
    parts = {
        "forward": float(place.value_bytes * tokens * widest),
        "head": _head(policy, role.actor, tokens, place, copies=2, backward=False),
    }
    if place.on_gpu:
        parts["gathered weights"] = _gathered(policy, place)
    return parts


def policy_update(config: Config, models: Models, place: Place) -> dict[str, float]:
    """What an update of the policy needs besides what is resident."""
    role = config.actor_rollout_ref
    actor, policy = role.actor, models.policy
    tokens = min(_pass_tokens(config, actor, place), _mini_batch_tokens(config, actor.ppo_mini_batch_size, place))
    parts = _backward(policy, role.model.enable_gradient_checkpointing, tokens, place)
    parts["head"] = _head(policy, actor, tokens, place, copies=3, backward=True)
    if actor.use_kl_loss and topk_of(actor):
        parts["top-k tensors"] = float(tokens * topk_of(actor) * (8 + 3 * FLOAT32))
    if models.anchor is not None and actor.kl_loss_type.startswith("full") and actor.use_kl_loss:
        parts["anchor gathered"] = _gathered(models.anchor, place) + _head(
            models.anchor, actor, tokens, place, copies=2, backward=False
        )
    return parts


def critic_update(config: Config, critic: ModelShape, place: Place) -> dict[str, float]:
    """What an update of the critic needs besides what is resident."""
    settings = config.critic
    tokens = min(_pass_tokens(config, settings, place), _mini_batch_tokens(config, settings.ppo_mini_batch_size, place))
    model = settings.model
    return _backward(critic, model.enable_gradient_checkpointing, tokens, place)


def activation_bytes(shape: ModelShape, checkpointing: bool, tokens: int, value_bytes: int) -> int:
    """Kept by a forward pass over `tokens`, and used by the backward pass of one layer."""
    norms = (6 if value_bytes == FLOAT32 else 8) * shape.hidden
    layer = norms + 2 * shape.query_width + 2 * shape.key_width + 4 * shape.mlp
    kept = layer + (shape.num_layers + 1) * shape.hidden if checkpointing else layer * shape.num_layers
    return value_bytes * tokens * (kept + norms // 2 + 2 * shape.mlp)


def _backward(shape: ModelShape, checkpointing: bool, tokens: int, place: Place) -> dict[str, float]:
    gradient = FLOAT32 * shape.num_params / place.workers
    holes = GPU_HOLES if place.on_gpu else CPU_HOLES_CHECKPOINTED if checkpointing else CPU_HOLES
    parts = {"activations": holes * activation_bytes(shape, checkpointing, tokens, place.value_bytes)}
    parts["gradients"] = gradient
    if place.on_gpu:
        # A unit's gradient is summed over the workers in float32; the root's is the largest.
        parts["gathered weights"] = _gathered(shape, place)
        parts["gradients in reduction"] = FLOAT32 * max(shape.root_params, shape.layer_params)
    else:
        parts["gradients in reduction"] = holes * gradient
    return parts


def _head(shape: ModelShape, actor: ActorConfig, tokens: int, place: Place, copies: int, backward: bool) -> float:
    """Logits of a chunk in float32, the head's float32 gradient and, where it has another format, a float32 copy."""
    default = default_chunk(shape.vocabulary, "cuda" if place.on_gpu else "cpu")
    chunk = min(tokens, actor.head_chunk_tokens or default)
    weights = (1 if place.on_gpu and actor.head_dtype == "float32" else 0) + (1 if backward else 0)
    return float(FLOAT32 * (copies * chunk * shape.vocabulary + weights * shape.head_params))


def _pass_tokens(config: Config, settings: object, place: Place) -> int:
    """Most tokens of a worker in one forward and backward pass, padding counted."""
    by_tokens: Mapping[str, int] = vars(settings)
    if by_tokens["use_dynamic_bsz"]:
        return by_tokens["ppo_max_token_len_per_gpu"]
    return max(1, by_tokens["ppo_micro_batch_size"] // place.workers) * window_of(config)


def _mini_batch_tokens(config: Config, size: int, place: Place) -> int:
    return _rank_tokens(config, largest_mini_batch(trajectories_per_step(config), size), place)


def _rank_tokens(config: Config, rows: int, place: Place) -> int:
    return -(-rows // place.workers) * window_of(config)


def _gathered(shape: ModelShape, place: Place) -> float:
    """Root unit, the layer that works and the one that comes next; all layers when there is one worker."""
    layers = shape.num_layers if place.workers == 1 else min(2, shape.num_layers)
    return float(place.value_bytes * (shape.root_params + layers * shape.layer_params))
