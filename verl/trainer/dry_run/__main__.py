"""`.venv/bin/python -m verl.trainer.dry_run key=value ... [--gpus 8x80]`: the engines on devices that compute nothing.

The settings are those of main_ppo or main_ppo_format. Models need a config.json alone.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from verl.config import Config, check_supported, load_config_from_argv
from verl.errors import ConfigError, VerlError
from verl.trainer.dry_run.advice import three_settings
from verl.trainer.dry_run.device import DevicePhase, device_phases
from verl.trainer.dry_run.gpus import GIB, GPUS, Place, parse_gpus
from verl.trainer.dry_run.report import report
from verl.trainer.dry_run.roles import run_roles
from verl.trainer.main_ppo_format import asks_for_format_reward, with_format_reward

SPARE = 0.05  # of a device, that should be left


@dataclass(frozen=True)
class Asked:
    """The command line: the run, and where it is thought to be."""

    config: Config
    place: Place


def parse(argv: list[str]) -> Asked:
    """Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus")
    own, others = parser.parse_known_args(argv)
    config = load_config_from_argv(others)
    if asks_for_format_reward(config):
        config = with_format_reward(config)
    check_supported(config)
    if config.trainer.val_only:
        raise ConfigError("trainer.val_only=True: nothing is trained, so there is nothing to run dry")
    return Asked(config, parse_gpus(own.gpus) if own.gpus else here(config))


def here(config: Config) -> Place:
    """This machine, with as many devices as the run asks for."""
    trainer = config.trainer
    num_ranks = trainer.n_gpus_per_node * trainer.nnodes
    if torch.cuda.is_available() and trainer.device != "cpu":
        found = torch.cuda.get_device_properties(0)
        known = tuple(gpu for gpu in GPUS if gpu.name.split("-")[0] in found.name)
        return Place(num_ranks, found.total_memory, known or GPUS[2:4])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Place(num_ranks, memory // trainer.n_gpus_per_node)


def verdict(config: Config, place: Place, phases: list[DevicePhase]) -> tuple[bool, str]:
    """Whether it fits, in words; what does not is told with three settings to change."""
    worst = max(phases, key=lambda phase: phase.total)
    found = f"{worst.total / GIB:.1f} of {place.memory / GIB:.1f} GiB in the phase {worst.name}"
    if worst.total <= place.memory * (1 - SPARE):
        return True, f"ok   fits: {found} at the worst"
    if worst.total <= place.memory:
        return True, f"warn fits narrowly: {found}; less than {SPARE:.0%} is left"
    gains = [f"{change} (-{gain / GIB:.1f} GiB)" for change, gain in three_settings(config, place, worst)]
    todo = f"change {', '.join(gains)}" if gains else "there is no setting that gains something"
    return False, f"FAIL does not fit: {found}; {todo}, or take more than {place.num_ranks} devices"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: it fits; 1: it does not, or cannot be run."""
    try:
        asked = parse(sys.argv[1:] if argv is None else argv)
        with _no_warnings():
            roles = run_roles(asked.config, asked.place.num_ranks, "cuda" if asked.place.on_gpu else "cpu")
            phases = device_phases(asked.config, roles, asked.place)
            print(report(asked.config, roles, phases, asked.place), flush=True)
            fits, words = verdict(asked.config, asked.place, phases)
    except VerlError as error:
        print(f"FAIL config: {error}")
        return 1
    print(words)
    return int(not fits)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """What an engine says of its model is no news here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


if __name__ == "__main__":
    sys.exit(main())
