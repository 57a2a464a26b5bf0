"""Print one question of a prompt file: the first one with the most hops. Used to show a trained model at work."""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow.parquet as pq


def example_question(path: Path) -> str:
    """The question of the chosen row: what follows `Question:` in its last message, or all of that message. The first
    row is chosen if no row has a number of hops."""
    rows = pq.read_table(path, columns=["prompt", "extra_info"]).to_pylist()
    row = max(rows, key=lambda row: row["extra_info"].get("hops") or 0)
    return row["prompt"][-1]["content"].rpartition("Question:")[2].strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m search_r1.evaluation.example_question", description=__doc__)
    parser.add_argument("prompts", type=Path, help="parquet file of prompts")
    print(example_question(parser.parse_args().prompts))
