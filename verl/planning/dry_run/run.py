"""A dry run: runs the roles pass by pass, adds up a device's memory, and says whether that fits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from verl.config import Config
from verl.engine.files.model_shape import ModelShape, policy_shape
from verl.planning.dry_run.advice import three_settings
from verl.planning.dry_run.device import DeviceUse, device_phases
from verl.planning.dry_run.kv_cache import room_for_sequences
from verl.planning.dry_run.place import GIB, Place, located
from verl.planning.dry_run.report import report
from verl.planning.dry_run.roles import Role, run_roles

SPARE = 0.05  # of a device, that should be left
Level = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class DryRun:
    """The result: the whole report, and a verdict, which says what does not fit and what to change.

    room: whether an engine has room for the longest sequence.
    """

    roles: list[Role]
    phases: list[DeviceUse]
    report: str
    level: Level
    verdict: str
    room: bool


def dry_run(config: Config, place: Place, policy: ModelShape | None = None, advise: bool = True) -> DryRun:
    """Run the roles of `config` on the devices of `place`, and judge whether they fit. `policy`: by default, from the
    settings. `advise`: if the run does not fit, try settings that save memory, which takes several times as long.
    Raises ConfigError for settings that no engine can be built from.
    """
    config = located(config, place)
    with no_warnings():
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
    return DryRun(roles, phases, text, level, words, room)


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
