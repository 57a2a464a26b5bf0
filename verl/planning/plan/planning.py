"""The search for a layout, and what is printed of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from verl.config import Config, load_config
from verl.engine.files.model_shape import policy_shape
from verl.errors import ConfigError
from verl.planning.dry_run.machine import Machine, machine_of, read_machine
from verl.planning.dry_run.place import Place, parse_gpus
from verl.planning.dry_run.run import no_warnings
from verl.planning.plan import report
from verl.planning.plan.report import draw
from verl.planning.plan.search import best_of, engine_settings, scaled, search


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
    print("\n".join(report.layouts(found, place)), flush=True)
    best = best_of(found)
    if best is None:
        closest = min(found, key=lambda one: max(phase.total for phase in one.phases))
        print(f"FAIL no layout fits; the closest: {closest.verdict}")
        return 1
    print("\n".join(["", *report.best(best, place, asked.steps, asked.price), ""]), flush=True)
    grown = [] if asked.no_scaling else list(scaled(load, best, place, policy, machine))
    if grown:
        print("\n".join([*report.scaling(grown, place), ""]))
    print("\n".join(report.assumed(best, place, machine)))
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
