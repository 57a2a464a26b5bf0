"""Which settings to change when a run does not fit: each is tried in the estimate, and ranked by what it gains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from verl.config import Config
from verl.trainer.preflight.memory import Phase, estimate
from verl.trainer.preflight.models import Models
from verl.trainer.preflight.quantities import Place

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# Key, and its next more frugal value (None: there is none).
CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("actor_rollout_ref.model.enable_gradient_checkpointing", lambda on: None if on else True),
    (f"{ACTOR}.fsdp_config.param_offload", lambda on: None if on else True),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", lambda on: None if on else True),
    (f"{ACTOR}.use_dynamic_bsz", lambda on: None if on else True),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", lambda tokens: tokens // 2 if tokens > 1 else None),
    (f"{ACTOR}.ppo_micro_batch_size", lambda rows: rows // 2 if rows > 1 else None),
    (f"{ACTOR}.head_chunk_tokens", lambda tokens: 64 if tokens is None or tokens > 64 else None),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", lambda tokens: tokens // 2 if tokens > 1 else None),
    (f"{ROLLOUT}.gpu_memory_utilization", lambda share: round(share - 0.1, 2) if share > 0.15 else None),
    (f"{ROLLOUT}.kv_cache_gib", lambda gib: gib / 2 if gib > 0.25 else None),
    ("critic.model.enable_gradient_checkpointing", lambda on: None if on else True),
    ("critic.model.fsdp_config.param_offload", lambda on: None if on else True),
    ("critic.ppo_max_token_len_per_gpu", lambda tokens: tokens // 2 if tokens > 1 else None),
    ("critic.ppo_micro_batch_size", lambda rows: rows // 2 if rows > 1 else None),
]


def peak(phases: list[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.total)


def three_settings(config: Config, models: Models, place: Place) -> list[tuple[str, float]]:
    """`key=value` and the bytes that it alone takes off the largest phase; the largest gain first, 3 at most."""
    worst = peak(estimate(config, models, place))
    gains = []
    for key, smaller in CHANGES:
        changed = copy.deepcopy(config)
        value = smaller(_get(changed, key))
        if value is None:
            continue
        _set(changed, key, value)
        phase = next(p for p in estimate(changed, models, place) if p.name == worst.name)
        shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
        gains.append((f"{key}={shown}", worst.total - phase.total))
    return sorted((gain for gain in gains if gain[1] > 0), key=lambda gain: -gain[1])[:3]


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _set(config: Config, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    setattr(_get(config, section), name, value)
