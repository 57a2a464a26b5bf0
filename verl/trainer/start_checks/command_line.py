"""The command line of the preflight: which run, and on which devices. Light, so that --help answers at once."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from verl.config import Config, check_supported, load_config_from_argv
from verl.config.rules.rewards import asks_for_format_reward, with_format_reward
from verl.errors import ConfigError
from verl.planning.dry_run.place import GIB, GPUS_HELP, USUAL, Place, here, parse_gpus


@dataclass(frozen=True)
class Arguments:
    """The command line: the run, and the devices that it is estimated for."""

    entry_point: str
    config: Config
    place: Place
    elsewhere: bool
    estimate_only: bool


def parse(argv: list[str]) -> Arguments:
    """Parse the arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", help=GPUS_HELP)
    parser.add_argument("--devices", type=int, help="instead of --gpus: number of devices")
    parser.add_argument(
        "--device_memory_gib", type=float, help="instead of --gpus: memory of each, in GiB as the driver counts them"
    )
    parser.add_argument("--estimate_only", action="store_true", help="the dry run alone")
    # All arguments that this program does not know are for the config.
    own, others = parser.parse_known_args(argv)
    config, entry_point = load_config_from_argv(others, own=parser), "verl.trainer.main_ppo"
    # Only main_ppo_format takes a config with these coefficients.
    if asks_for_format_reward(config):
        config, entry_point = with_format_reward(config), "verl.trainer.main_ppo_format"
    check_supported(config)
    place = _elsewhere(config, own)
    return Arguments(entry_point, config, place or here(config), place is not None, own.estimate_only)


def _elsewhere(config: Config, own: argparse.Namespace) -> Place | None:
    """The devices that the command line describes; None if it describes none. Raises ConfigError."""
    devices, gib = own.devices, own.device_memory_gib
    if devices is None and gib is None:
        return parse_gpus(own.gpus) if own.gpus is not None else None
    if own.gpus is not None:
        raise ConfigError(f"--gpus {own.gpus} says how many and of what size: leave out --devices, --device_memory_gib")
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices {devices}: give a number of devices from 1")
    if gib is not None and not 0 < gib * GIB < math.inf:
        raise ConfigError(f"--device_memory_gib {gib:g}: give the GiB of a device, a finite number above 0")
    # What the command line leaves out is as on this machine.
    own_place = here(config)
    memory = own_place.memory if gib is None else int(gib * GIB)
    on_gpu = own_place.on_gpu or config.trainer.device != "cpu"
    return Place(devices or own_place.num_devices, memory, USUAL if on_gpu else ())
