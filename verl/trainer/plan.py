"""Which layout to take: `.venv/bin/python -m verl.trainer.plan --gpus 4x8xH100 key=value ... [-- key=value ...]`.

The settings are those of main_ppo. Those behind `--`, or all of them without a `--`, are kept as given; those before it
are a script's, and the planner may change the ones about engines, sharding, offloading, checkpointing or micro-batches:
`TRAINER=verl.trainer.plan bash train_grpo.sh` plans the script's run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from url_text import mask_text
from verl.config.loading.command_line import add_file_options
from verl.errors import VerlError
from verl.process.startup import leave


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: a layout fits; 1: none does, or the settings are wrong."""
    parsed, changeable, kept = parse(sys.argv[1:] if argv is None else argv)

    from verl.planning.plan.planning import Asked, plan  # imports torch, which --help need not wait for

    try:
        return plan(Asked(changeable, kept, **vars(parsed)))
    except VerlError as error:
        print(f"FAIL config: {mask_text(str(error))}")
        return 1


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The options, the settings that a layout may replace, and those that are kept; none of them checked yet."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.trainer.plan",
        description=(__doc__ or "").splitlines()[0],
        usage="%(prog)s [options] [key=value of a script ... --] [key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="Hugging Face name or folder; its config.json suffices; default: the settings'")
    parser.add_argument(
        "--gpus",
        help="nodes x GPUs per node x kind, such as 4x8xH100, or a size for the kind; 4xCPU; default: the settings' "
        "number of nodes and of GPUs, of this machine's kind, or H100",
    )
    parser.add_argument(
        "--machine", type=Path, help="file written by verl.planning.plan.calibrate, used instead of a data sheet"
    )
    add_file_options(parser, "ppo_trainer")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--price", type=float, help="price of a GPU hour, for the cost")
    parser.add_argument("--png", type=Path, help="write a picture of the plan")
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="print how the layout scales to more nodes too, which takes a dry run for each",
    )
    # The settings before `--` are those of a script, which a layout may replace.
    words = list(argv)
    cut = words.index("--") if "--" in words else 0
    script, user = words[:cut], words[cut + 1 :] if "--" in words else words
    parsed, changeable = parser.parse_known_args(script)
    parsed, kept = parser.parse_known_args(user, parsed)
    others = [word for word in [*changeable, *kept] if not word.startswith("~")]
    if unknown := [word for word in others if word.startswith("-") or "=" not in word]:
        parser.error(f"not understood: {' '.join(unknown)}; settings are key=value or ~key")
    return parsed, changeable, kept


if __name__ == "__main__":
    leave(main())
