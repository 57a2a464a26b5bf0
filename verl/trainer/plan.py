"""Which layout to take: `.venv/bin/python -m verl.trainer.plan --model Qwen/Qwen2.5-32B --gpus 4x8xH100 key=value ...`.

The settings are those of main_ppo. Settings of engines, sharding, offloading or micro-batches are kept as given.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.errors import VerlError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: a layout fits; 1: none does, or the settings are wrong."""
    asked = parse(argv)

    from verl.planning.plan.planning import plan  # imports torch, which --help need not wait for

    try:
        return plan(asked)
    except VerlError as error:
        print(f"FAIL config: {error}")
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, not checked yet."""
    parser = argparse.ArgumentParser(prog="python -m verl.trainer.plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face name or folder; its config.json suffices")
    parser.add_argument("--gpus", required=True, help="nodes x GPUs per node x kind, such as 4x8xH100; or 4xCPU")
    parser.add_argument(
        "--machine", type=Path, help="file written by verl.planning.plan.calibrate, used instead of a data sheet"
    )
    parser.add_argument("--config-name", default="ppo_trainer")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--price", type=float, help="price of a GPU hour, for the cost")
    parser.add_argument("--png", type=Path, help="write a picture of the plan")
    parser.add_argument(
        "--no_scaling", action="store_true", help="leave out the table for more nodes, which takes a dry run for each"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())
