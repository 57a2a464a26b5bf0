"""The planner: searches for a layout and reports the layouts that were tried, the best one with its settings and its
cost, and how it scales.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl.config import Config, load_config
from verl.config.rules.predicates import trajectories_per_step
from verl.engine.files.loading import policy_shape
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.machine import Machine, machine_of, read_machine
from verl.planning.dry_run.place import GIB, Place, parse_gpus
from verl.planning.dry_run.report import FILLED
from verl.planning.dry_run.run import no_warnings
from verl.planning.plan.sampling import ITERATION_S, SEARCH_S
from verl.planning.plan.search import Planned, Scaled, best_of, engine_settings, scaled, search
from verl.process.storage import whole_file


def layouts(found: Sequence[Planned], place: Place) -> Iterator[str]:
    """Table of layouts: whether each fits, GiB left in its fullest phase, seconds a phase, GiB that a rank sends."""
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
    """The settings of the best layout, as a command line takes them, and the cost of `steps` steps."""
    trainer = one.config.trainer
    nodes = [f"trainer.nnodes={trainer.nnodes}", f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"]
    yield "the fastest that fits:"
    yield from (f"  {setting} \\" for setting in [*nodes, *one.settings])
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


# The plan as a PNG: a step of each layout by phase, and how the best one scales and what it is bound by there.


def draw(found: Sequence[Planned], scaled: Sequence[Scaled], title: str, path: Path) -> None:
    """Write the picture. Raises StorageError."""
    figure = Figure(figsize=(12, 1.6 + 0.45 * max(4, len(found))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    bars, curve = figure.subplots(1, 2, width_ratios=[3, 2])
    _bars(bars, found)
    _curve(curve, scaled)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _bars(axes: Axes, found: Sequence[Planned]) -> None:
    names = [f"{one.engine} an engine, {one.sharding}" + ("" if one.fits else " (does not fit)") for one in found]
    places = list(range(len(found)))
    left = [0.0] * len(found)
    for phase in Phase:
        seconds = [one.costs[phase].seconds for one in found]
        axes.barh(places, seconds, left=left, label=str(phase))
        left = [sum(pair) for pair in zip(left, seconds, strict=True)]
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(fontsize=8, ncols=len(Phase), loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _curve(axes: Axes, scaled: Sequence[Scaled]) -> None:
    numbers = [one.num_gpus for one in scaled]
    seconds = [one.planned.seconds for one in scaled]
    axes.loglog(numbers, seconds, marker="o", label="a step")
    axes.loglog(numbers, [seconds[0] * numbers[0] / number for number in numbers], linestyle=":", label="at best")
    bound = [f"{one.num_gpus}: {one.planned.bottleneck}" + " (no fit)" * (not one.planned.fits) for one in scaled]
    axes.set_xticks(numbers, bound, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("GPUs: what binds a step")
    axes.set_ylabel("seconds of a step")
    axes.legend(fontsize=8)


def plan(asked: argparse.Namespace) -> int:
    """Print the plan for the arguments. Returns 0, or 1 if no layout fits. Raises VerlError."""
    with no_warnings():
        return _plan(asked)


def _plan(asked: argparse.Namespace) -> int:
    # A layout's settings come before the user's, which override them.
    place = parse_gpus(asked.gpus)
    models = [f"{key}={asked.model}" for key in ("actor_rollout_ref.model.path", "critic.model.path")]
    possible = engine_settings(1)  # on a node of any size; larger engines are tried where they divide it
    possible += [f"trainer.n_gpus_per_node={place.per_node}"] if place.per_node else []

    def load(settings: Sequence[str]) -> Config:
        return load_config(asked.config_name, [*models, *possible, *settings, *asked.overrides])

    # Each part is printed as soon as it is known: the search takes minutes.
    machine, policy = _machine(asked, place), policy_shape(load([]))
    title = f"{asked.model} ({policy.num_params / 1e9:.1f} B) on {asked.gpus}"
    print(title, flush=True)
    found = list(search(load, place, policy, machine, partial(print, file=sys.stderr, flush=True)))
    print("\n".join(layouts(found, place)), flush=True)
    fastest = best_of(found)
    if fastest is None:
        closest = min(found, key=lambda one: max(phase.total for phase in one.phases))
        print(f"FAIL no layout fits; the closest: {closest.verdict}")
        return 1
    print("\n".join(["", *best(fastest, place, asked.steps, asked.price), ""]), flush=True)
    grown = [] if asked.no_scaling else list(scaled(load, fastest, place, policy, machine))
    if grown:
        print("\n".join([*scaling(grown, place), ""]))
    print("\n".join(assumed(fastest, place, machine)))
    if asked.png:
        draw(found, grown, title, asked.png)
    return 0


def _machine(asked: argparse.Namespace, place: Place) -> Machine:
    if asked.machine:
        return read_machine(asked.machine)
    if not place.on_gpu:
        raise ConfigError(
            f"--gpus {asked.gpus}: there is no data sheet for CPUs; run `python -m verl.planning.plan.calibrate "
            "--output machine.json`, and add --machine machine.json"
        )
    if len(place.gpus) != 1:
        raise ConfigError(f"--gpus {asked.gpus}: the time depends on the kind of GPU; name it, as in 4x8xH100")
    return machine_of(place.gpus[0])
