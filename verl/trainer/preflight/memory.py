"""Memory of each phase on one worker, from shapes and settings: an estimate before anything is loaded.

Of a trained model with P parameters over N workers: float32 weights 4P/N, two moments of AdamW 8P/N, gradients 4P/N
while an update lasts; an anchor 4P/N. What is gathered is in the format of the forward pass. `passes` has the formulas
of the passes, `sampler` those of the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl import phases as step
from verl.config import Config
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.passes import critic_update, log_probs, policy_update
from verl.trainer.preflight.quantities import FLOAT32, GIB, Place
from verl.trainer.preflight.sampler import sampler_bytes, sampler_parts
from verl.trainer.preflight.shape import ModelShape

MIB = 2**20
WORKER_BYTES = 37 * 2**20  # what the first update of a process on CPU imports and never gives back
CUDA_CONTEXT_BYTES = GIB // 2


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
    phases = [Phase("rollout", _resident(config, models, place) | sampler_parts(config, models.policy, place))]
    if place.on_gpu and config.trainer.nnodes == 1:  # elsewhere the weights go through a file
        phases.append(Phase("weight sync", _resident(config, models, place) | _sync(config, models.policy)))
    scored = _resident(config, models, place, actor=step.Phase.SCORE)
    phases.append(Phase("log-probs", scored | log_probs(config, models, place)))
    updated = _resident(config, models, place, actor=step.Phase.UPDATE)
    phases.append(Phase("update", updated | policy_update(config, models, place)))
    if models.critic is not None:
        learned = _resident(config, models, place, critic=step.Phase.UPDATE)
        phases.append(Phase("critic update", learned | critic_update(config, models.critic, place)))
    return phases


def actor_update(config: Config, models: Models, place: Place) -> float:
    """Peak bytes of the actor's process alone in an update."""
    alone = Models(models.policy, models.anchor)
    resident = _resident(config, alone, place, actor=step.Phase.UPDATE)
    return sum((resident | policy_update(config, alone, place)).values())


def _sync(config: Config, policy: ModelShape) -> dict[str, float]:
    """Of a sampler that wakes for its weights, and of the bucket that comes."""
    rollout = config.actor_rollout_ref.rollout
    whole = float(sampler_bytes(config, policy))
    largest = whole * policy.head_params / policy.num_params  # a tensor that is larger than a bucket travels whole
    parts = {"weights on their way": max(largest, float(min(whole, rollout.weight_sync.bucket_mib * MIB)))}
    if rollout.free_cache_engine:
        parts["sampler weights"] = whole / rollout.tensor_model_parallel_size
    return parts


def _resident(
    config: Config,
    models: Models,
    place: Place,
    actor: step.Phase = step.Phase.SAMPLE,
    critic: step.Phase = step.Phase.SAMPLE,
) -> dict[str, float]:
    """What of the roles lies on the device while each is in this phase, besides what its passes need."""
    role = config.actor_rollout_ref
    learner, frozen, value = role.actor.fsdp_config, role.ref.fsdp_config, config.critic.model.fsdp_config

    def here(phase: step.Phase, part: step.Part, offload: bool) -> bool:
        return part in step.RESIDENT[phase] or not (offload and place.on_gpu)

    parts = {"process": float(CUDA_CONTEXT_BYTES if place.on_gpu else WORKER_BYTES)}
    policy_bytes = FLOAT32 * models.policy.num_params / place.workers
    if here(actor, step.Part.PARAMETERS, learner.param_offload):
        parts["policy weights"] = policy_bytes
    if here(actor, step.Part.OPTIMIZER, learner.optimizer_offload):
        parts["policy optimizer"] = 2 * policy_bytes
    if models.anchor is not None and here(actor, step.Part.ANCHOR, frozen.param_offload):
        parts["anchor weights"] = FLOAT32 * models.anchor.num_params / place.workers
    if models.critic is not None:
        critic_bytes = FLOAT32 * models.critic.num_params / place.workers
        if here(critic, step.Part.PARAMETERS, value.param_offload):
            parts["critic weights"] = critic_bytes
        if here(critic, step.Part.OPTIMIZER, value.optimizer_offload):
            parts["critic optimizer"] = 2 * critic_bytes
    if place.on_gpu and not role.rollout.free_cache_engine:
        parts |= sampler_parts(config, models.policy, place)
    return parts
