"""The planner: searches for a layout and reports the layouts that were tried, the best one with its settings and its
cost, and how it scales.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import Config, load_variants
from verl.config.rules.placement import devices_of_nodes
from verl.config.rules.predicates import trajectories_per_step
from verl.config.rules.rewards import asks_for_format_reward, with_format_reward
from verl.engine.files.loading import ModelShape, policy_shape
from verl.errors import ConfigError
from verl.phases import Phase
from verl.planning.dry_run.fake_device import frozen_heap
from verl.planning.dry_run.machine import machine_of, read_machine
from verl.planning.dry_run.place import GIB, Place, here, parse_gpus
from verl.planning.dry_run.report import FILLED, PROMISED
from verl.planning.dry_run.run import dry_run, no_warnings
from verl.planning.plan.measure import Measured
from verl.planning.plan.sampling import ASSUMED
from verl.planning.plan.search import (
    SIMPLER,
    Machines,
    Planned,
    Scaled,
    best_of,
    engine_settings,
    scaled,
    search,
)
from verl.process.storage import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Asked:
    """The command line of the planner. `changeable` settings are those of a script, which a layout may replace, `kept`
    ones are the user's. `gpus`: None for as many as the settings say; `model`: None for the settings'.
    """

    changeable: list[str]
    kept: list[str]
    gpus: str | None = None
    model: str | None = None
    machine: Path | None = None
    config_name: str = "ppo_trainer"
    config_dir: str | None = None
    steps: int = 1000
    price: float | None = None
    png: Path | None = None
    scaling: bool = False


def layouts(found: Sequence[Planned], place: Place) -> Iterator[str]:
    """Table of layouts: whether each fits, an engine's share of a GPU and the trajectories that it samples at once, GiB
    left in the fullest phase, estimated seconds a phase, a step's floor and estimate, GiB that a rank sends.
    """
    names = [f"{one.engine} {_unit(place)}{'s' * (one.engine > 1)} an engine, {one.sharding}" for one in found]
    width = max(map(len, names))
    phases = "".join(f"{phase:>8}" for phase in Phase)
    columns = f"{'share':>6}{'at once':>9}{'left':>7}{phases}{'floor':>8}{'estimate':>9}{'in node':>9}{'between':>9}"
    yield f"{'layout':<{width}} {'':<4}{columns}  bound by"
    for name, one in zip(names, found, strict=True):
        left = (place.memory - max(phase.total for phase in one.phases)) / GIB
        seconds = "".join(f"{one.costs[phase].seconds:8.1f}" for phase in Phase)
        sent = "".join(f"{one.sent.get(where, 0.0) / GIB:9.1f}" for where in ("in node", "between nodes"))
        engines = f"{one.utilization:6.2f}{f'{one.at_once.number}/{one.at_once.share}':>9}"
        step = f"{one.floor:8.1f}{one.seconds:9.1f}"
        yield f"{name:<{width}} {one.level:<4}{engines}{left:7.1f}{seconds}{step}{sent}  {one.bottleneck}"


def best(one: Planned, place: Place, steps: int, price: float | None) -> Iterator[str]:
    """The settings of the best layout, as a command line takes them, and the estimated cost of `steps` steps."""
    trainer = one.config.trainer
    nodes = [f"trainer.nnodes={trainer.nnodes}", f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"]
    yield f"the simplest that fits, of those at most {SIMPLER:.0%} slower than the fastest:"
    yield from (f"  {setting} \\" for setting in [*nodes, *one.settings])
    yield f"memory: {one.verdict}"
    yield f"sampling: {one.at_once}"
    yield f"a step: at least {one.floor:.0f} s, estimated {one.seconds:.0f} s; not measured"
    hours, unit = one.seconds * steps / 3600, _unit(place)
    cost = f", {hours * place.num_devices * price:,.0f} at {price:g} a {unit} hour" if price is not None else ""
    yield f"{steps:,} steps: {hours:,.1f} h, {hours * place.num_devices:,.0f} {unit} hours{cost} (estimated)"


def scaling(found: Sequence[Scaled], place: Place) -> Iterator[str]:
    yield f"{_unit(place) + 's':>5}{'step s':>9}{'efficiency':>12}  bound by"
    for one in found:
        fits = "" if one.planned.fits else "  (does not fit)"
        yield (f"{one.num_gpus:>5}{one.planned.seconds:9.1f}{one.efficiency:12.0%}  {one.planned.bottleneck}{fits}")


def assumed(one: Planned, place: Place, machines: Machines) -> Iterator[str]:
    """What memory and seconds rest on."""
    rows, rollout = trajectories_per_step(one.config), one.config.actor_rollout_ref.rollout
    expected, floor = machines.expected, machines.floor
    by_objects = rollout.nnodes and not rollout.weight_sync.is_broadcast(place.kind)
    objects = f"Ray's object store sends {expected.object_bytes / 1e9:g} GB/s; " if by_objects else ""
    waiting = (
        f"{ASSUMED.iteration * 1000:g} ms an iteration of an engine beside its work, {ASSUMED.search:g} s a search"
    )
    yield f"memory is by dry run; seconds are a model, not measured: {rows:,} trajectories that fill {FILLED:.0%} of"
    yield f"their limit, of {one.at_once.window} tokens"
    yield f"estimate ({expected.name}): {waiting}; {objects}{expected.source}"
    if floor is not expected:
        yield f"floor ({floor.name}): all of the data sheet's rates, all the time, and no waiting"


def _unit(place: Place) -> str:
    return "GPU" if place.on_gpu else "core"


# The plan as a PNG: a step of each layout by phase, and how the best one scales and what it is bound by there.


def draw(found: Sequence[Planned], scaled: Sequence[Scaled], title: str, path: Path) -> None:
    """Write the picture. Raises StorageError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # takes half a second, which a plan need not wait for
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 + 0.45 * max(4, len(found))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)  # a $ in the path of a model is no formula
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


def plan(asked: Asked) -> int:
    """Print the plan for the arguments. Returns 0, or 1 if no layout fits. Raises VerlError."""
    with no_warnings(), frozen_heap():
        return _plan(asked)


def _plan(asked: Asked) -> int:
    # A layout's settings come before those that are kept, and behind those of a script. Engines of one GPU are possible
    # on a node of any size; larger ones are tried where they divide it.
    run = [*engine_settings(1), *asked.changeable]
    if asked.model:
        run += [f"{key}={asked.model}" for key in ("actor_rollout_ref.model.path", "critic.model.path")]
    variant = load_variants(asked.config_name, run, asked.config_dir)
    place = _place(asked, variant(asked.kept))
    nodes = [f"trainer.n_gpus_per_node={place.per_node}"] if place.per_node else []

    def load(settings: Sequence[str]) -> Config:
        config = variant([*nodes, *settings, *asked.kept])
        return with_format_reward(config) if asks_for_format_reward(config) else config

    # Each part is printed as soon as it is known.
    config = load([])
    machines, policy, measured = _machines(asked, place), policy_shape(config), Measured(place.kind)
    kind = place.gpus[0].name if len(place.gpus) == 1 else f"{place.memory / GIB:.0f} GiB"
    gpus = asked.gpus or f"{len(devices_of_nodes(config))}x{place.per_node}x{kind}"
    title = f"{config.actor_rollout_ref.model.path} ({policy.num_params / 1e9:.1f} B) on {gpus}"
    print(title, flush=True)
    found = list(search(load, place, policy, machines, measured, partial(print, file=sys.stderr, flush=True)))
    taken = _confirmed(found, place, policy, measured)
    print("\n".join(layouts(found, place)), flush=True)
    if taken is None:
        closest = min(found, key=lambda one: max(phase.total for phase in one.phases))
        print(f"FAIL no layout fits; the closest: {closest.verdict}")
        return 1
    print("\n".join(["", *best(taken, place, asked.steps, asked.price), ""]), flush=True)
    grown = list(scaled(load, taken, place, policy, machines, measured)) if asked.scaling else []
    if grown:
        print("\n".join([*scaling(grown, place), ""]))
    print("\n".join(assumed(taken, place, machines)))
    if asked.png:
        draw(found, grown or [Scaled(place.num_devices, taken, 1.0)], title, asked.png)
    return 0


def _confirmed(found: list[Planned], place: Place, policy: ModelShape, measured: Measured) -> Planned | None:
    """The best layout, after a dry run with all layers where the search has used fewer; it replaces that in `found`."""
    while best := best_of(found):
        if measured.exact:
            return best
        print(f"dry run with all layers: {best.sharding}", file=sys.stderr, flush=True)
        exact = dry_run(best.config, place, policy, advise=False)
        sure = replace(best, level=exact.level, verdict=exact.verdict, phases=exact.phases)
        found[found.index(best)] = sure
        if exact.level == best.level or (exact.level != "FAIL" and best_of(found) is sure):
            return sure
    return None


def _place(asked: Asked, config: Config) -> Place:
    """The devices that the arguments describe, else as many as the run's settings, such as this machine's, or H100."""
    if asked.gpus:
        return parse_gpus(asked.gpus)
    wanted = parse_gpus(f"{len(devices_of_nodes(config))}x{config.trainer.n_gpus_per_node}xH100")
    ours = here(config)
    return replace(wanted, memory=ours.memory, gpus=ours.gpus) if ours.on_gpu else wanted


def _machines(asked: Asked, place: Place) -> Machines:
    if asked.machine:
        measured = read_machine(asked.machine)
        return Machines(measured, measured)
    if not place.on_gpu:
        raise ConfigError(
            f"--gpus {asked.gpus}: there is no data sheet for CPUs; run `python -m verl.planning.plan.calibrate "
            "--output machine.json`, and add --machine machine.json"
        )
    slowest, *_, fastest = sorted([*place.gpus, *place.gpus], key=lambda gpu: gpu.bf16_flops)
    return Machines(machine_of(fastest, PROMISED), machine_of(slowest))
