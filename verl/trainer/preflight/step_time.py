"""A rough time of one step, from the arithmetic alone. The assumptions are part of the answer."""

from __future__ import annotations

from typing import NamedTuple

from verl.config import Config
from verl.config.counts import trajectories_per_step
from verl.config.objective import has_kl_in_reward
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.quantities import Place, window_of

# Sustained, a device: operations a second in training, bytes a second in decoding.
GPU_FLOPS, GPU_BYTES, CPU_FLOPS, CPU_BYTES = 150e12, 1.5e12, 2e10, 5e9
FILLED = 0.5  # of the window, by the average trajectory


class StepTime(NamedTuple):
    tokens: int
    rollout_s: float
    training_s: float
    assumed: str


def step_time(config: Config, models: Models, place: Place) -> StepTime:
    """Operations a token and parameter: 2 forward, 4 backward, 2 again with gradient checkpointing."""
    flops, bandwidth = (GPU_FLOPS, GPU_BYTES) if place.on_gpu else (CPU_FLOPS, CPU_BYTES)
    role, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    window, rows = window_of(config), trajectories_per_step(config)
    tokens = int(rows * window * FILLED)
    epochs = 0 if config.trainer.val_only else role.actor.ppo_epochs
    per_token = epochs * (8 if role.model.enable_gradient_checkpointing else 6) * models.policy.num_params
    per_token += 0 if rollout.seed_per_request and role.actor.use_rollout_log_probs else 2 * models.policy.num_params
    if models.anchor is not None:
        both = role.actor.use_kl_loss and has_kl_in_reward(config)
        per_token += (2 * epochs if role.actor.use_kl_loss else 0) * models.anchor.num_params
        per_token += 2 * models.anchor.num_params if both or not role.actor.use_kl_loss else 0
    if models.critic is not None:
        per_token += (6 * config.critic.ppo_epochs + 2) * models.critic.num_params
    ranks = rollout.tensor_model_parallel_size if place.on_gpu else 1
    engines = max(1, place.workers // ranks) if place.on_gpu else rollout.num_engines
    waves = -(-rows // (engines * min(rollout.max_num_seqs, rollout.max_concurrent or rollout.max_num_seqs)))
    width = 4 if rollout.dtype == "float32" else 2
    decoding = waves * window * FILLED * width * models.policy.num_params / ranks / bandwidth
    assumed = (
        f"trajectories fill {FILLED:.0%} of {window} tokens, {flops / 1e12:g} TFLOP/s and {bandwidth / 1e9:g} GB/s "
        "sustained a device, no waiting for the retriever"
    )
    return StepTime(tokens, decoding, tokens * per_token / (flops * place.workers), assumed)
