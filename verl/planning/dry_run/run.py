"""A dry run: runs the roles pass by pass, adds up a device's memory, and says whether that fits.

When a phase does not fit, changes of the settings are tried, each alone, and ranked by what they gain there.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from verl.config import Config
from verl.config.sections.fields import value_at
from verl.engine.files.loading import ModelShape, policy_shape
from verl.phases import Phase
from verl.planning.dry_run.device import (
    SPARE,
    AtOnce,
    DeviceUse,
    device_phases,
    more_at_once,
    room_for_sequences,
    sampled_at_once,
)
from verl.planning.dry_run.fake_device import frozen_heap
from verl.planning.dry_run.place import GIB, Place, located
from verl.planning.dry_run.report import report
from verl.planning.dry_run.roles import Role, run_role, run_roles

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
        # Only the role whose setting it is runs again; the others take the same memory as before.
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


Level = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class DryRun:
    """The result: the whole report, and a verdict, which says what does not fit and what to change.

    at_once: how many trajectories an engine samples at once; `level` is "warn" where that is less than a quarter.
    """

    roles: list[Role]
    phases: list[DeviceUse]
    report: str
    level: Level
    verdict: str
    at_once: AtOnce


def dry_run(config: Config, place: Place, policy: ModelShape | None = None, advise: bool = True) -> DryRun:
    """Run the roles of `config` on the devices of `place`, and judge whether they fit. `policy`: by default, from the
    settings. `advise`: if the run does not fit, try settings that save memory, which takes several times as long.
    Raises ConfigError for settings that no engine can be built from.
    """
    config = located(config, place)
    with no_warnings(), frozen_heap():
        roles = run_roles(config, place.kind)
        found = judged(config, roles, place, policy or policy_shape(config))
        if advise and found.level == "FAIL":
            words = f"{found.verdict}{_advice(config, roles, place, found.phases)}"
            found = replace(found, verdict=words)
    return found


def judged(config: Config, roles: list[Role], place: Place, policy: ModelShape) -> DryRun:
    """Judge roles that have been run, on the devices of `place`. `config` may differ from theirs in what concerns
    engines.
    """
    phases = device_phases(config, roles, place)
    room, cache = room_for_sequences(config, policy, place)
    text = f"{report(config, roles, phases, place)}\nKV cache: {cache}"
    level, words = _verdict(place, phases)
    if not room:
        level, words = "FAIL", f"KV cache: {cache}; memory {words}"
    at_once = sampled_at_once(config, policy, place)
    if level != "FAIL" and at_once.starves:
        level, words = "warn", f"{words}; the sampler starves: {at_once}; {more_at_once(config, policy, phases, place)}"
    return DryRun(roles, phases, text, level, words, at_once)


def _verdict(place: Place, phases: list[DeviceUse]) -> tuple[Level, str]:
    worst = _worst(phases)
    found = f"{worst.total / GIB:.1f} of {place.memory / GIB:.1f} GiB at the peak of the phase {worst.phase}"
    if worst.total <= place.memory * (1 - SPARE):
        return "ok", f"fits: {found}"
    if worst.total <= place.memory:
        return "warn", f"barely fits: {found}; less than {SPARE:.0%} is left"
    return "FAIL", f"does not fit: {found}"


def _advice(config: Config, roles: list[Role], place: Place, phases: list[DeviceUse]) -> str:
    gains = three_settings(config, roles, place, _worst(phases))
    changes = [f"{change} (-{gain / GIB:.1f} GiB)" for change, gain in gains]
    todo = f"change {', '.join(changes)}" if changes else "no setting would gain anything"
    return f"; {todo}, or use more than {place.num_devices} devices"


def _worst(phases: list[DeviceUse]) -> DeviceUse:
    return max(phases, key=lambda phase: phase.total)


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Context in which nothing is logged up to warnings: what an engine says of its model is no news here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
