"""Memory of each phase on one worker, from shapes and settings: an estimate before anything is loaded.

Of a trained model with P parameters over N workers: float32 weights 4P/N, two moments of AdamW 8P/N, gradients 4P/N
while an update lasts; an anchor 4P/N. What is gathered is in the format of the forward pass. `passes` has the formulas
of the passes, `sampler` those of the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.config import Config
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.passes import critic_update, log_probs, off_loaded, policy_update
from verl.trainer.preflight.quantities import FLOAT32, GIB, Place
from verl.trainer.preflight.sampler import sampler_bytes, sampler_parts

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
    resident = _resident(config, models, place)
    phases = [Phase("rollout", resident | sampler_parts(config, models.policy, place))]
    if place.on_gpu and config.trainer.nnodes == 1:  # elsewhere the weights go through a file
        whole = float(sampler_bytes(config, models.policy))
        phases.append(Phase("weight sync", phases[0].parts | {"whole weights for the sampler": whole}))
    phases.append(Phase("log-probs", resident | log_probs(config, models, place)))
    phases.append(Phase("update", resident | policy_update(config, models, place)))
    if models.critic is not None:
        phases.append(Phase("critic update", resident | critic_update(config, models.critic, place)))
    return phases


def actor_update(config: Config, models: Models, place: Place) -> float:
    """Peak bytes of the actor's process alone in an update."""
    alone = Models(models.policy, models.anchor)
    return sum((_resident(config, alone, place) | policy_update(config, alone, place)).values())


def _resident(config: Config, models: Models, place: Place) -> dict[str, float]:
    """What lies on the device through all phases."""
    role = config.actor_rollout_ref
    parts = {"process": float(CUDA_CONTEXT_BYTES if place.on_gpu else WORKER_BYTES)}
    if not off_loaded(role.actor.fsdp_config, place):
        parts["policy weights"] = FLOAT32 * models.policy.num_params / place.workers
        parts["policy optimizer"] = 2 * FLOAT32 * models.policy.num_params / place.workers
    if models.anchor is not None and not off_loaded(role.ref.fsdp_config, place):
        parts["anchor weights"] = FLOAT32 * models.anchor.num_params / place.workers
    if models.critic is not None and not off_loaded(config.critic.model.fsdp_config, place):
        parts["critic weights and optimizer"] = 3 * FLOAT32 * models.critic.num_params / place.workers
    if place.on_gpu and not role.rollout.free_cache_engine:
        parts |= sampler_parts(config, models.policy, place)
    return parts
