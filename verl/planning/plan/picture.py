"""The plan as a PNG: a step of each layout by phase, and how the best one scales and what it is bound by there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from verl.phases import Phase
from verl.planning.plan.scaling import Scaled
from verl.planning.plan.search import Planned
from verl.process.storage import whole_file


def draw(found: Sequence[Planned], scaled: Sequence[Scaled], title: str, path: Path) -> None:
    """Write the picture. Raises StorageError."""
    figure = Figure(figsize=(12, 1.6 + 0.45 * max(4, len(found))), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    bars, curve = figure.subplots(1, 2, width_ratios=[3, 2])
    _bars(bars, found)
    _curve(curve, scaled)
    with whole_file(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _bars(axes: Axes, found: Sequence[Planned]) -> None:
    names = [f"{one.engine} an engine, {one.sharding}" + ("" if one.fits else " (does not fit)") for one in found]
    places = list(range(len(found)))
    left = [0.0] * len(found)
    for phase in Phase:
        seconds = [one.costs[phase].seconds for one in found]
        axes.barh(places, seconds, left=left, label=str(phase))
        left = [sum(pair) for pair in zip(left, seconds, strict=True)]
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.legend(fontsize=8, ncols=len(Phase), loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _curve(axes: Axes, scaled: Sequence[Scaled]) -> None:
    numbers = [one.num_gpus for one in scaled]
    seconds = [one.planned.seconds for one in scaled]
    axes.loglog(numbers, seconds, marker="o", label="a step")
    axes.loglog(numbers, [seconds[0] * numbers[0] / number for number in numbers], linestyle=":", label="at best")
    bound = [f"{one.num_gpus}: {one.planned.bottleneck}" + " (no fit)" * (not one.planned.fits) for one in scaled]
    axes.set_xticks(numbers, bound, rotation=30, ha="right", rotation_mode="anchor", fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("GPUs: what binds a step")
    axes.set_ylabel("seconds of a step")
    axes.legend(fontsize=8)
