"""Command line: `python -m search_r1.data.tinywiki --output_dir DIR [--seed N] [--num_passages N] [--long]`."""

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from search_r1.data.tinywiki.build import LONG, Recipe, build
from verl.errors import VerlError


def main(arguments: list[str] | None = None) -> int:
    """Build the folder; return 0, or 1 after printing what was wrong."""
    parser = argparse.ArgumentParser(prog="python -m search_r1.data.tinywiki", description="Write a TinyWiki folder.")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of worlds, questions, trajectories and weights")
    parser.add_argument("--num_passages", type=int, default=2000, help="passages served by the retriever")
    parser.add_argument("--num_test", type=int, default=500, help="questions in test.parquet")
    parser.add_argument("--num_train", type=int, default=None, help="questions in train.parquet")
    parser.add_argument("--num_sft_rows", type=int, default=None, help="warm-start rows; the phases keep their shares")
    parser.add_argument("--long", action="store_true", help="questions of 1, 2 and 3 hops instead of 1 and 2")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    recipe = replace(
        LONG if given.long else Recipe(), seed=given.seed, num_passages=given.num_passages, num_test=given.num_test
    )
    if given.num_train is not None:
        recipe = replace(recipe, num_train=given.num_train)
    if given.num_sft_rows is not None:
        recipe = with_sft_rows(recipe, given.num_sft_rows)
    try:
        build(recipe, given.output_dir)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def with_sft_rows(recipe: Recipe, num_rows: int) -> Recipe:
    """Return the recipe with that many warm-start rows in all."""
    num_lm = round(num_rows * recipe.num_lm_rows / (recipe.num_lm_rows + recipe.num_policy_rows))
    return replace(recipe, num_lm_rows=num_lm, num_policy_rows=num_rows - num_lm)


if __name__ == "__main__":
    sys.exit(main())
