"""What a plan says: the layouts that were tried, the best one with its settings and its cost, and how it scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl.config.rules.counts import trajectories_per_step
from verl.phases import Phase
from verl.planning.dry_run.gpus import GIB
from verl.planning.dry_run.machine import Machine
from verl.planning.dry_run.place import Place
from verl.planning.dry_run.report import FILLED
from verl.planning.plan.sampling import ITERATION_S, SEARCH_S
from verl.planning.plan.scaling import Scaled
from verl.planning.plan.search import Planned


def layouts(found: Sequence[Planned], place: Place) -> Iterator[str]:
    """A table: whether each fits, GiB left in its largest phase, seconds of a step by phase, GiB that a rank sends."""
    names = [f"{one.engine} {_unit(place)}{'s' * (one.engine > 1)} an engine, {one.sharding}" for one in found]
    width = max(map(len, names))
    phases = "".join(f"{phase:>8}" for phase in Phase)
    yield f"{'layout':<{width}} {'':<4} {'left':>6}{phases}{'step s':>9}{'in node':>9}{'between':>9}  bound by"
    for name, one in zip(names, found, strict=True):
        left = (place.memory - max(phase.total for phase in one.phases)) / GIB
        seconds = "".join(f"{one.costs[phase].seconds:8.1f}" for phase in Phase)
        sent = "".join(f"{one.sent.get(where, 0.0) / GIB:9.1f}" for where in ("in node", "between nodes"))
        yield f"{name:<{width}} {one.level:<4} {left:6.1f}{seconds}{one.seconds:9.1f}{sent}  {one.bottleneck}"


def best(one: Planned, place: Place, steps: int, price: float | None) -> Iterator[str]:
    """Settings, as a command line takes them, and the cost of `steps` steps."""
    yield "the fastest that fits:"
    yield from (f"  {setting} \\" for setting in [*_nodes(one), *one.settings])
    hours, unit = one.seconds * steps / 3600, _unit(place)
    cost = f", {hours * place.num_devices * price:,.0f} at {price:g} a {unit} hour" if price is not None else ""
    yield f"{steps:,} steps: {hours:,.1f} h, {hours * place.num_devices:,.0f} {unit} hours{cost}"


def scaling(found: Sequence[Scaled], place: Place) -> Iterator[str]:
    yield f"{_unit(place) + 's':>5}{'step s':>9}{'efficiency':>12}  bound by"
    for one in found:
        fits = "" if one.planned.fits else "  (does not fit)"
        yield (f"{one.num_gpus:>5}{one.planned.seconds:9.1f}{one.efficiency:12.0%}  {one.planned.bottleneck}{fits}")


def assumed(one: Planned, place: Place, machine: Machine) -> Iterator[str]:
    rows, rollout = trajectories_per_step(one.config), one.config.actor_rollout_ref.rollout
    by_objects = rollout.nnodes and not rollout.weight_sync.is_broadcast(place.kind)
    objects = f"Ray's object store sends {machine.object_bytes / 1e9:g} GB/s; " if by_objects else ""
    yield (
        f"memory is by dry run; seconds are a model: {rows:,} trajectories that fill {FILLED:.0%} of their limit; "
        f"{ITERATION_S * 1000:g} ms an iteration of an engine beside its arithmetic, {SEARCH_S:g} s a search; "
        f"{objects}{machine.source}"
    )


def _unit(place: Place) -> str:
    return "GPU" if place.on_gpu else "core"


def _nodes(one: Planned) -> list[str]:
    trainer = one.config.trainer
    return [f"trainer.nnodes={trainer.nnodes}", f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"]
