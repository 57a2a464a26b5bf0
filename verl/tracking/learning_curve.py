"""The plot of a run: training reward and held-out scores by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from verl.process.storage import whole_file
from verl.tracking.run_data import Curve, RunData

TRAIN_METRIC = "critic/score/mean"
SPLITS = {"val": "validation", "test": "test", "val_ref": "anchor on validation"}
"""The held-out splits: the metric prefix of each, and its name for people."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe-Ito: also for colour-blind readers
LOOKS: dict[str, dict[str, Any]] = {
    "val": {"linestyle": "-", "marker": "o", "markersize": 4},
    "test": {"linestyle": "none", "marker": "D", "markersize": 6, "markerfacecolor": "white", "markeredgewidth": 1.6},
    "val_ref": {"linestyle": ":", "marker": "none"},
}
"""The looks of each split. The test is measured a few times only: points, as a line would invent what lies between."""

SMOOTHING = 0.8  # of the training reward: the share that an average keeps of the one before


def draw_learning_curve(run: RunData, path: Path) -> None:
    """Write a PNG. Training reward is shown as it is (faint) and as an exponential moving average.

    Raises StorageError.
    """
    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, run.curve(TRAIN_METRIC))
    _draw_splits(axes, run)
    _dress(axes, run)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw_training(axes: Axes, curve: Curve) -> None:
    if not curve:
        return
    steps, values = list(curve), list(curve.values())
    axes.plot(steps, values, color="0.75", linewidth=0.8, zorder=1)
    label = "training reward (smoothed)"
    axes.plot(steps, _smooth(values), color="0.35", linewidth=1.6, label=label, zorder=2)


def _draw_splits(axes: Axes, run: RunData) -> None:
    """Draw the scores by source and split. A source has one colour in all splits, and one entry in the legend; each
    further split adds one for its look.
    """
    named: set[str] = set()
    colours = _colours(run)
    for prefix, look in LOOKS.items():
        curves = {name: run.curve(f"{prefix}/test_score/{name}") for name in colours}
        drawn = {name: curve for name, curve in curves.items() if curve}
        for name, curve in drawn.items():
            label = None if name in named else f"{SPLITS[prefix]}: {'all' if name == 'mean' else name}"
            width = 2.4 if name == "mean" else 1.6
            axes.plot(list(curve), list(curve.values()), color=colours[name], linewidth=width, label=label, **look)
        if named & drawn.keys():
            axes.plot([], [], color="0.35", label=f"{SPLITS[prefix]} (same colours)", **look)
        named |= drawn.keys()


def _colours(run: RunData) -> dict[str, str]:
    """Colour by data source; the overall mean is black, and left out where there is one source only."""
    names = {name for prefix in SPLITS for name in run.names(f"{prefix}/test_score/")}
    sources = sorted(names - {"mean"})
    overall = {"mean": "black"} if len(sources) != 1 else {}
    return overall | {source: COLOURS[index % len(COLOURS)] for index, source in enumerate(sources)}


def _dress(axes: Axes, run: RunData) -> None:
    project, experiment = run.setting("trainer.project_name"), run.setting("trainer.experiment_name")
    axes.set_title(" / ".join(str(name) for name in (project, experiment) if name) or run.run_dir.name, loc="left")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward per question")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0), max(high, 1.0))
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")


def _smooth(values: list[float]) -> list[float]:
    """Exponential moving average, corrected for its start so that the first points are not pulled to zero."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed
