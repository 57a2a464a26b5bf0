"""The same layout and batch on more and more nodes: where more of them stop paying off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verl.engine.files.model_shape import ModelShape
from verl.planning.dry_run.machine import Machine
from verl.planning.dry_run.place import Place
from verl.planning.dry_run.roles import run_roles
from verl.planning.plan.search import Loader, Planned, engine_settings, placed, planned

MOST = 4096  # GPUs
FACTOR = 4


@dataclass(frozen=True)
class Scaled:
    """A layout on `num_gpus`; `efficiency`: speed-up over the first layout, divided by the ideal one."""

    num_gpus: int
    planned: Planned
    efficiency: float


def scaled(load: Loader, first: Planned, place: Place, policy: ModelShape, machine: Machine) -> Iterator[Scaled]:
    """Start from the plan's devices; each size takes a dry run."""
    yield Scaled(place.num_devices, first, 1.0)
    for number in _numbers(place.num_devices):
        larger = replace(place, num_devices=number)
        apart = first.sharding.sampling_nodes * number // place.num_devices
        sharding = replace(first.sharding, sampling_nodes=apart)
        roles = run_roles(placed(load, [*engine_settings(first.engine), *sharding.settings], larger), place.kind)
        found = planned(load, first.engine, sharding, roles, larger, policy, machine)
        yield Scaled(number, found, first.seconds * place.num_devices / (found.seconds * number))


def _numbers(first: int) -> Iterator[int]:
    """Multiples of the first up to the last one that is no more than `MOST`."""
    number, last = first * FACTOR, MOST // first * first
    while number < last:
        yield number
        number *= FACTOR
    if last > first:
        yield last
