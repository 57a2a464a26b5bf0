"""The table and the figure of an experiment, from what its finished runs left on disk.

.venv/bin/python scripts/experiments/collect.py scripts/experiments/algorithms.yaml [--output_dir DIR] [--publish]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean, median

from experiment import ROOT, TEST_SCORE, Experiment, Run, Variant, add_options, read_experiment
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl.errors import DataError, VerlError
from verl.tracking.report import COLOURS
from verl.tracking.run_data import RunData

RESULTS = ROOT / "docs" / "results"
VALIDATION_SCORE = "val/test_score/mean"
COLUMNS = {"overall": TEST_SCORE, "1-hop": "test/test_score/tinywiki_1hop", "2-hop": "test/test_score/tinywiki_2hop"}
WHOLES = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
"""What the time of a run consists of; the phases of a step are inside its own."""
LINES = ("-", "--", ":")

Results = dict[Variant, dict[int, RunData]]
"""Finished runs by variant and seed."""


def finished_runs(experiment: Experiment, runs: Sequence[Run]) -> Results:
    """Raises DataError if no run is finished."""
    found: Results = {variant: {} for variant in experiment.variants}
    for run in runs:
        if run.why_unfinished() is None:
            found[run.variant][run.world.seed] = run.finished()
    if not any(found.values()):
        raise DataError(f"no run of {experiment.name} is finished: {runs[0].why_unfinished()}")
    return found


def write_results(experiment: Experiment, runs: Sequence[Run], folder: Path) -> Path:
    """Write NAME.md and NAME.png into `folder`; the path of the table. Raises DataError if no run is finished."""
    results = finished_runs(experiment, runs)
    table, figure = folder / f"{experiment.name}.md", folder / f"{experiment.name}.png"
    draw_figure(experiment.title, results, figure)
    lines = [f"# {experiment.title}", "", *_explanation(experiment, results), "", *table_lines(results)]
    lines += ["", f"![Exact match on validation by training step]({figure.name})"]
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return table


def publish(table: Path) -> Path:
    """Copy a table and its figure to docs/results; the path of the copy."""
    shutil.copy(table.with_suffix(".png"), RESULTS)
    return Path(shutil.copy(table, RESULTS))


def table_lines(results: Results) -> list[str]:
    """Markdown: a row for the policies before RL, then one for each variant that has a finished run."""
    header = ["", *COLUMNS, "runs", "s/step", "minutes"]
    rows = [_before(results)]
    for variant, by_seed in results.items():
        if by_seed:
            runs = list(by_seed.values())
            scores = [spread(_last(run, name) for run in runs) for name in COLUMNS.values()]
            times = [f"{median(_step_seconds(runs)):.1f}", f"{fmean(map(_minutes, runs)):.1f}"]
            rows.append([variant.label, *scores, str(len(runs)), *times])
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def spread(values: Iterable[float]) -> str:
    """Mean (smallest to largest)."""
    given = list(values)
    return f"{fmean(given):.3f} ({min(given):.3f} to {max(given):.3f})"


def draw_figure(title: str, results: Results, path: Path) -> None:
    """A PNG: for each variant the mean over seeds of validation exact match, in a band from lowest to highest."""
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    looks = zip(cycle(COLOURS), (line for line in LINES for _ in COLOURS), strict=False)
    for (variant, by_seed), (colour, line) in zip(results.items(), looks, strict=False):
        if by_seed:
            _draw(axes, variant.label, list(by_seed.values()), colour, line)
    axes.set_title(title, loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel("exact match on validation, mean and range over seeds")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.02)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    figure.savefig(path)


def _draw(axes: Axes, label: str, runs: Sequence[RunData], colour: str, line: str) -> None:
    low, high, mean = (over_seeds(runs, of) for of in (min, max, fmean))
    steps = list(mean)
    axes.fill_between(steps, list(low.values()), list(high.values()), color=colour, alpha=0.12, linewidth=0)
    axes.plot(steps, list(mean.values()), color=colour, linestyle=line, marker="o", markersize=3, label=label)


def over_seeds(runs: Sequence[RunData], of: Callable[[list[float]], float]) -> dict[int, float]:
    """By the steps that every run was validated at."""
    curves = [run.curve(VALIDATION_SCORE) for run in runs]
    return {step: of([curve[step] for curve in curves]) for step in curves[0] if all(step in curve for curve in curves)}


def _explanation(experiment: Experiment, results: Results) -> list[str]:
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed})
    missing = [
        f"{variant.label} (seed {seed})"
        for variant, by_seed in results.items()
        for seed in experiment.seeds
        if seed not in by_seed
    ]
    some = next(run for by_seed in results.values() for run in by_seed.values())
    text = [
        f"These are the runs of `scripts/experiments/{experiment.name}.yaml`, made with `scripts/experiments/grid.py`:",
        f"{max(some.metrics)} steps, seeds {', '.join(map(str, seeds))}. A score is exact match on the test questions",
        "after the last step, sampled greedily: mean over seeds (lowest to highest seed). `s/step` is the median time",
        "of a step; `minutes` is a run's mean time for training and evaluation, without loading.",
    ]
    return text + ([f"Unfinished runs are left out: {', '.join(missing)}."] if missing else [])


def _before(results: Results) -> list[str]:
    """All runs of a seed start from one policy, so the first run that has a seed speaks for it."""
    by_seed: dict[int, RunData] = {}
    for of_variant in results.values():
        by_seed = of_variant | by_seed
    started = list(by_seed.values())
    return ["before RL", *(spread(run.curve(name)[0] for run in started) for name in COLUMNS.values()), "", "", ""]


def _last(run: RunData, name: str) -> float:
    return run.metrics[max(run.metrics)][name]


def _step_seconds(runs: Iterable[RunData]) -> list[float]:
    return [seconds for run in runs for seconds in run.curve("timing_s/step").values()]


def _minutes(run: RunData) -> float:
    return sum(sum(run.curve(name).values()) for name in WHOLES) / 60


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the table and the figure of an experiment's finished runs.")
    add_options(parser)
    options = parser.parse_args()
    try:
        experiment = read_experiment(options.experiment, options.seeds, options.steps)
        output_dir = options.output_dir or Path("runs") / experiment.name
        table = write_results(experiment, experiment.runs(output_dir, options.worlds_dir), output_dir)
    except (VerlError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"results: {publish(table) if options.publish else table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
