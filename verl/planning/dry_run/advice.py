"""What to change when a phase does not fit: changes are tried, each alone, and ranked by what they gain there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from verl.config import Config
from verl.config.sections.keys import value_at
from verl.phases import Phase
from verl.planning.dry_run.device import DeviceUse, device_phases
from verl.planning.dry_run.place import Place
from verl.planning.dry_run.roles import Role, run_role

ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "critic"
Change = tuple[str, Callable[[Any], Any]]


def _on(value: Any) -> Any:
    return None if value else True


def _half(value: Any) -> Any:
    return value // 2 if value > 1 else None


def _lower_share(share: Any) -> Any:
    return round(share - 0.1, 2) if share > 0.15 else None


def _small_chunk(tokens: Any) -> Any:
    return 256 if tokens is None or tokens > 256 else None


OFFLOAD: list[Change] = [
    (f"{ACTOR}.fsdp_config.optimizer_offload", _on),
    (f"{ACTOR}.fsdp_config.param_offload", _on),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", _on),
    (f"{CRITIC}.model.fsdp_config.optimizer_offload", _on),
    (f"{CRITIC}.model.fsdp_config.param_offload", _on),
]
TOKENS = "max_token_len_per_gpu"
OF_ENGINES = (f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.free_cache_engine")
# Key, and its next more frugal value (None: there is none), by phase.
CHANGES: dict[Phase, list[Change]] = {
    Phase.SAMPLE: [*OFFLOAD, (f"{ROLLOUT}.gpu_memory_utilization", _lower_share)],
    Phase.SYNC: [*OFFLOAD, (f"{ROLLOUT}.gpu_memory_utilization", _lower_share)],
    Phase.SCORE: [
        (f"{ACTOR}.head_chunk_tokens", _small_chunk),
        (f"{ROLLOUT}.log_prob_micro_batch_size", _half),
        (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", _half),
        (f"{CRITIC}.forward_micro_batch_size", _half),
        (f"{CRITIC}.forward_max_token_len_per_gpu", _half),
        (f"{ROLLOUT}.free_cache_engine", _on),
        *OFFLOAD,
    ],
    Phase.UPDATE: [
        ("actor_rollout_ref.model.enable_gradient_checkpointing", _on),
        (f"{ACTOR}.head_chunk_tokens", _small_chunk),
        (f"{ACTOR}.ppo_micro_batch_size", _half),
        (f"{ACTOR}.ppo_max_token_len_per_gpu", _half),
        (f"{CRITIC}.model.enable_gradient_checkpointing", _on),
        (f"{CRITIC}.ppo_micro_batch_size", _half),
        (f"{CRITIC}.ppo_max_token_len_per_gpu", _half),
        (f"{ROLLOUT}.free_cache_engine", _on),
        *OFFLOAD,
    ],
}


def three_settings(config: Config, roles: list[Role], place: Place, worst: DeviceUse) -> list[tuple[str, float]]:
    """Up to 3 pairs of `key=value` and the bytes that this change alone saves in the phase, largest gain first."""
    gains = []
    for key, frugal in CHANGES[worst.phase]:
        if not _counts(key, config, worst):
            continue
        changed = copy.deepcopy(config)
        value = frugal(value_at(changed, key))
        if value is None:
            continue
        section, _, name = key.rpartition(".")
        setattr(value_at(changed, section), name, value)
        again = [
            run_role(role.name, changed, place.kind, [worst.phase]) if role.name == _holder(key) else role
            for role in roles
        ]
        phases = device_phases(changed, again, place)
        after = next(use for use in phases if (use.phase, use.device) == (worst.phase, worst.device))
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        gains.append((f"{key}={shown}", worst.total - after.total))
    return sorted((gain for gain in gains if gain[1] > 0), key=lambda gain: -gain[1])[:3]


def _counts(key: str, config: Config, worst: DeviceUse) -> bool:
    """Whether what the key is about is on that device, and whether it matters: of two limits of a pass one does."""
    if _holder(key) not in {part.partition(":")[0].split()[0] for part in worst.parts}:
        return False
    section, _, name = key.rpartition(".")
    if not name.endswith(("micro_batch_size", TOKENS)):
        return True
    by_tokens = f"{ROLLOUT}.log_prob_use_dynamic_bsz" if section == ROLLOUT else f"{section}.use_dynamic_bsz"
    return bool(value_at(config, by_tokens)) == name.endswith(TOKENS)


def _holder(key: str) -> str:
    """The holder of the memory that the key is about: the first word of `DeviceUse.parts`."""
    return "engine" if key in OF_ENGINES else "critic" if key.startswith(CRITIC) else "actor"
