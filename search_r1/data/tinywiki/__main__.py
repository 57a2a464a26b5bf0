"""Command line: `.venv/bin/python -m search_r1.data.tinywiki --output_dir DIR [--seed N] [--num_passages N]
[--long | --marathon | --chat]`.

`--stop`, `--next_hop` and `--train_hops` make the world harder or easier to learn in than the recipe's defaults.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from program_end import exit_status
from verl.process.startup import PLAIN, log_to_stderr

if TYPE_CHECKING:
    from search_r1.data.tinywiki.build import Recipe


def main(arguments: list[str] | None = None) -> int:
    """Build the folder; return 0, or 1 after printing what was wrong."""
    parser = argparse.ArgumentParser(prog="python -m search_r1.data.tinywiki", description="Write a TinyWiki folder.")
    # the folder, and how large it is
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of worlds, questions, trajectories and weights")
    parser.add_argument("--num_passages", type=int, default=2000, help="number of passages in the corpus")
    parser.add_argument("--num_test", type=int, default=500, help="number of questions in test.parquet")
    parser.add_argument("--num_train", type=int, default=None, help="number of questions in train.parquet")
    parser.add_argument(
        "--num_sft_rows",
        type=int,
        default=None,
        help="number of warm-start rows; the shares of the phases stay the same",
    )
    parser.add_argument("--chat", action="store_true", help="for a chat model that calls tools")
    # how hard the questions are, and how good the demonstrations
    parser.add_argument("--long", action="store_true", help="questions of 1, 2 and 3 hops instead of 1 and 2")
    parser.add_argument("--marathon", action="store_true", help="questions of 8 to 12 hops, too long for the window")
    parser.add_argument("--stop", type=probability, help="demonstrator: probability of answering after a passage")
    parser.add_argument("--next_hop", type=probability, help="demonstrator: probability of noting the next hop")
    parser.add_argument(
        "--train_hops", type=hops, help="hop counts that the training prompts cycle through, such as 1,2,2"
    )
    parser.add_argument(
        "--kinds",
        type=kinds,
        help="with --chat: kinds beside 1 and 2 hops, such as page,arithmetic (all)",
    )
    args = parser.parse_args(arguments)
    if args.kinds is not None and not args.chat:
        parser.error("--kinds needs --chat: these questions need its tools")
    if args.chat + args.long + args.marathon > 1:
        parser.error("--long, --marathon and --chat are different questions; give one of them")
    log_to_stderr(PLAIN)

    from search_r1.data.tinywiki.build import build  # imports torch, which --help need not wait for

    return exit_status(lambda: build(recipe_of(args), args.output_dir), "the folder is not complete")


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe of the mode, with the values from the command line."""
    from search_r1.data.tinywiki.build import recipe_for

    recipe = recipe_for(args)
    recipe = replace(recipe, seed=args.seed, num_passages=args.num_passages, num_test=args.num_test)
    if args.num_sft_rows is not None:  # divided between the phases as the recipe divides its own
        num_lm = round(args.num_sft_rows * recipe.num_lm_rows / (recipe.num_lm_rows + recipe.num_policy_rows))
        recipe = replace(recipe, num_lm_rows=num_lm, num_policy_rows=args.num_sft_rows - num_lm)
    habits = replace(recipe.habits, **_without_none(stop=args.stop, next_hop=args.next_hop))
    given = _without_none(num_train=args.num_train, train_hops=args.train_hops, kinds=args.kinds)
    return replace(recipe, habits=habits, **given)


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def probability(text: str) -> float:
    if not 0.0 <= (value := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a probability in 0..1")
    return value


def hops(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if not set(counts) <= {1, 2, 3}:
        raise argparse.ArgumentTypeError(f"{text} is not a list of hop counts, each 1, 2 or 3")
    return counts


def kinds(text: str) -> tuple[str, ...]:
    from search_r1.data.tinywiki.questions import TOOL_KINDS

    names = tuple(name for name in text.split(",") if name)
    if not set(names) <= set(TOOL_KINDS):
        raise argparse.ArgumentTypeError(f"{text} is not a list of kinds, each one of {', '.join(TOOL_KINDS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
