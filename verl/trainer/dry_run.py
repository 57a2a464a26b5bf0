"""`.venv/bin/python -m verl.trainer.dry_run key=value ... [--gpus 8x80]`: memory and work of a run, without a device.

The settings are those of main_ppo or main_ppo_format. Models need only a config.json.
"""

from __future__ import annotations

import argparse
import sys

from url_text import mask_text
from verl.config import Config, check_supported, load_config_from_argv
from verl.config.rules.rewards import asks_for_format_reward, with_format_reward
from verl.errors import ConfigError, VerlError
from verl.planning.dry_run.place import GPUS_HELP, Place, here, parse_gpus
from verl.process.startup import leave


def parse(argv: list[str]) -> tuple[Config, Place]:
    """The run, and the devices that it is estimated for. Raises ConfigError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gpus", help=GPUS_HELP)
    own, others = parser.parse_known_args(argv)
    config = load_config_from_argv(others, own=parser)
    if asks_for_format_reward(config):
        config = with_format_reward(config)
    check_supported(config)
    if config.trainer.val_only:
        raise ConfigError("trainer.val_only=True: nothing is trained, so a dry run has nothing to measure")
    return config, parse_gpus(own.gpus) if own.gpus is not None else here(config)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: it fits; 1: it does not, or cannot be run."""
    try:
        config, place = parse(sys.argv[1:] if argv is None else argv)

        from verl.planning.dry_run.run import dry_run  # imports torch, which --help need not wait for

        found = dry_run(config, place)
    except VerlError as error:
        print(f"FAIL config: {mask_text(str(error))}")
        return 1
    print(found.report)
    print(f"{found.level:<4} {found.verdict}")
    return int(found.level == "FAIL")


if __name__ == "__main__":
    leave(main())
