"""Compare evaluations of the same questions, paired by question: is one side better than the other?

A side is one evaluation, or several of different seeds. Pairs are given in order: the first of one side has the seed of
the first of the other. The interval of a difference is a percentile bootstrap over questions, and the p-value that of a
two-sided permutation test which exchanges the sides of a question. A question is drawn and exchanged with all its
seeds, whose answers are not independent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from program_end import exit_status
from search_r1.evaluation.report import markdown_table
from search_r1.evaluation.statistics import estimates, permutation_p
from search_r1.evaluation.store import RECORDS, SCORES, SETTINGS, Record, read_records, same_judge
from verl.errors import DataError
from verl.protocol import by_number


def compared(before: Sequence[Path], after: Sequence[Path], metric: str) -> list[dict[str, Any]]:
    """A row for each pair of evaluations (`seed` is its number), and, where there are several, one for all of them; of
    each set of questions and of `all`. `difference` is the mean of after - before, `low` and `high` its 95% interval.

    Raises DataError for folders without results, and unless all of them have the same questions.
    """
    if len(before) != len(after):
        raise DataError(f"{len(before)} evaluations cannot be paired with {len(after)}: name one of each seed")
    if metric == "judge":
        _check_same_judge([*before, *after])
    first = _records(before[0], metric)
    keys = sorted(first)
    # The metric of each side as an array over seeds and questions; the questions stand in the same order in both.
    sides = []
    for folders in (before, after):
        values_SQ = []
        for folder in folders:
            records = _records(folder, metric)
            _check_same(first, records, f"{folder} and {before[0]} do not have the same questions")
            values_SQ.append([float(records[key].metrics[metric] or 0.0) for key in keys])
        sides.append(np.array(values_SQ))
    before_SQ, after_SQ = sides
    # Each seed by itself, then all: there a question's value is its mean over the seeds.
    seeds: list[tuple[str, slice]] = [(str(seed), slice(seed, seed + 1)) for seed in range(len(before_SQ))]
    parts = [*seeds, *([("all", slice(None))] if len(seeds) > 1 else [])]
    sets = np.array([first[key].set_name for key in keys])
    return [row for seed, part in parts for row in _rows(seed, sets, before_SQ[part].mean(0), after_SQ[part].mean(0))]


def _records(folder: Path, metric: str) -> dict[str, Record]:
    """The records by question. Raises DataError where one has no such metric."""
    records = {record.key: record for record in read_records(folder / RECORDS)}
    missing = [key for key, record in records.items() if record.failed or record.metrics.get(metric) is None]
    if not records or missing:
        what = f"question {missing[0]} has no {metric}" if records else "no questions"
        raise DataError(f"{folder / RECORDS}: {what}; finish the evaluation first, or compare by another metric")
    return records


def _check_same(one: Mapping[str, Record], other: Mapping[str, Record], problem: str) -> None:
    """Raise DataError unless both have the same questions. Where a file has no ids, its rows are counted, so that the
    same key may be another question; then the gold answers differ."""
    for key in one.keys() ^ other.keys():
        raise DataError(f"{problem}: {key} is in one of them")
    for key, record in one.items():
        if set(record.golden_answers) != set(other[key].golden_answers):
            both = f"{record.golden_answers!r:.100} and {other[key].golden_answers!r:.100}"
            raise DataError(f"{problem}: the gold answers of {key} are {both}")


def _check_same_judge(folders: Sequence[Path]) -> None:
    """Raise DataError unless one judge gave the verdicts in all evaluations; a folder may have lost its settings."""
    files = [folder / SETTINGS for folder in folders if (folder / SETTINGS).is_file()]
    judges = [json.loads(file.read_text(encoding="utf-8")).get("judge") for file in files]
    for file, judge in zip(files, judges, strict=True):
        if not same_judge(judges[0], judge):
            raise DataError(
                f"{file.parent} and {files[0].parent} have verdicts of different judges: {judge} and {judges[0]}"
            )


def _rows(seed: str, sets: np.ndarray, before_Q: np.ndarray, after_Q: np.ndarray) -> list[dict[str, Any]]:
    of_sets = {str(name): sets == name for name in sorted(set(sets), key=by_number)}
    chosen = of_sets | {"all": np.ones(len(sets), bool)} if len(of_sets) > 1 else of_sets
    rows = []
    for name, among_Q in chosen.items():
        difference_Q = (after_Q - before_Q)[among_Q]
        # Resampled within their sets, as in every other interval.
        by_set = {one: (after_Q - before_Q)[of][:, None] for one, of in of_sets.items() if name in (one, "all")}
        [estimate] = estimates(by_set)[2]
        row = {"seed": seed, "set": name, "questions": int(among_Q.sum())}
        means = {"before": float(before_Q[among_Q].mean()), "after": float(after_Q[among_Q].mean())}
        found = {"difference": estimate.mean, "low": estimate.low, "high": estimate.high}
        rows.append(row | means | found | {"p": permutation_p(difference_Q)})
    return rows


def table(rows: Sequence[dict[str, Any]], metric: str) -> str:
    """The rows in Markdown."""
    head = ("seed", "set", "questions", f"{metric} before", "after", "difference [95% interval]", "p")
    cells = (
        (
            *(str(row[name]) for name in ("seed", "set", "questions")),
            *(f"{row[name]:.3f}" for name in ("before", "after")),
            f"{row['difference']:+.3f} {_interval(row)}",
            f"{row['p']:.3g}",
        )
        for row in rows
    )
    return markdown_table(head, cells)


def _interval(row: Mapping[str, Any]) -> str:
    """The interval; where all questions differ alike, resampling them says nothing of others."""
    return f"[{row['low']:+.3f}, {row['high']:+.3f}]" if row["low"] < row["high"] else "(all alike)"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Exits with status 2 for one that is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m search_r1.evaluation.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, nargs="+", required=True, help="--output_dir of evaluations, by seed")
    parser.add_argument("--after", type=Path, nargs="+", required=True, help="those to compare them with, by seed")
    parser.add_argument("--metric", choices=SCORES, default="em", help="what is compared (default: em)")
    parser.add_argument("--output", type=Path, help="write the rows as JSON, too")
    return parser.parse_args(argv)


def run() -> None:
    args = parse_arguments()
    rows = compared(args.before, args.after, args.metric)
    print(table(rows, args.metric))
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(exit_status(run, ""))
