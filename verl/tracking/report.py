"""The report of a run: `.venv/bin/python -m verl.tracking.report RUN_DIR` writes it beside its metrics, with a plot of
training reward and held-out scores by step.

It reads only what the run left on disk (metrics.jsonl, config.yaml, trajectories/), so it can be made at any time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from program_end import exit_status
from verl.config.sections.fields import is_changed, leaves
from verl.config.sections.schema import Config
from verl.process.storage import whole_file
from verl.protocol import by_number
from verl.tracking.changed_settings import flattened
from verl.tracking.run_data import Curve, RunData, load_run
from verl.tracking.trajectory_store import (
    READING_COLUMNS,
    Kind,
    choose_three,
    find_trajectories,
    read_trajectories,
    render_trajectory,
)

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
    with rc_context({"text.parse_math": False}):  # a $ in the name of a source or experiment is no formula
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
            # A source is named in the legend by the first split that has it.
            label = None if name in named else f"{SPLITS[prefix]}: {'all' if name == 'mean' else name}"
            width = 2.4 if name == "mean" else 1.6
            axes.plot(list(curve), list(curve.values()), color=colours[name], linewidth=width, label=label, **look)
        # A line without points: only an entry in the legend, for the look of the split.
        if named & drawn.keys():
            axes.plot([], [], color="0.35", label=f"{SPLITS[prefix]} (same colours)", **look)
        named |= drawn.keys()


def _colours(run: RunData) -> dict[str, str]:
    """Colour by data source; the overall mean is black, and left out where there is one source only."""
    names = {name for prefix in SPLITS for name in run.names(f"{prefix}/test_score/")}
    sources = sorted(names - {"mean"}, key=by_number)
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


SETTINGS = (
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "max_turns",
    "retriever.url",
    "retriever.topk",
    "reward.function",
    "algorithm.adv_estimator",
    "algorithm.ref_policy_ema_tau",
    "algorithm.ref_policy_ema_update_period",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.rollout.n_agent",
    "actor_rollout_ref.rollout.temperature",
    "trainer.total_training_steps",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.seed",
)
LONGEST_VALUE = 200  # characters of a setting
TRAJECTORY_KINDS: tuple[Kind, ...] = ("val", "test", "train")


def write_report(run_dir: Path | str) -> Path:
    """Write report.md and report.png into `run_dir` and return the path of report.md. Raises DataError when there are
    no metrics, and StorageError."""
    run = load_run(run_dir)
    draw_learning_curve(run, run.run_dir / "report.png")
    sections = [_heading(run), "![Learning curve](report.png)"]
    sections += [_before_after(run, prefix) for prefix in SPLITS]
    sections += [_anomalies(run), _time(run), _settings(run), _trajectories(run)]
    path = run.run_dir / "report.md"
    with whole_file(path) as temporary:
        temporary.write_text("\n\n".join(section for section in sections if section) + "\n", encoding="utf-8")
    return path


def _heading(run: RunData) -> str:
    name = run.setting("trainer.experiment_name") or run.run_dir.name
    text = f"# Run {name}\n\nSteps {min(run.metrics)} to {max(run.metrics)}."
    reward = run.curve(TRAIN_METRIC)
    if reward:
        values = list(reward.values())
        count = min(10, len(values))
        first, last = sum(values[:count]) / count, sum(values[-count:]) / count
        text += f" Mean training reward: {first:.3f} over the first {count} steps, {last:.3f} over the last {count}."
    return text


def _before_after(run: RunData, prefix: str) -> str:
    # The mean of all sources is the last row.
    names = sorted(run.names(f"{prefix}/test_score/"), key=lambda name: (name == "mean", by_number(name)))
    rows = [row for source in names if (row := _score_row(run, prefix, source))]
    if not rows:
        return ""
    header = (
        "data source",
        "questions",
        "first",
        "step",
        "last",
        "step",
        "change",
        "searches each",
        "finished",
        *(["several calls in a turn"] if _has_calls(run, prefix) else []),
    )
    return f"## Before and after: {SPLITS[prefix]}\n\n" + _table(header, rows)


def _has_calls(run: RunData, prefix: str) -> bool:
    return bool(run.names(f"{prefix}/parallel_calls/"))


def _score_row(run: RunData, prefix: str, source: str) -> list[str]:
    curve = run.curve(f"{prefix}/test_score/{source}")
    if not curve:
        return []
    first, last = min(curve), max(curve)
    # The number of questions is that of the last evaluation; that of all sources is stored without a name.
    count_name = f"{prefix}/num_questions" + ("" if source == "mean" else f"/{source}")
    count = run.metrics[last].get(count_name)
    change = f"{curve[last] - curve[first]:+.3f}" if last != first else "-"
    row = [
        "**all**" if source == "mean" else source,
        "-" if count is None else f"{count:.0f}",
        *(f"{curve[first]:.3f}", str(first), f"{curve[last]:.3f}", str(last), change),
        _from_to(run, f"{prefix}/searches_per_question/{source}", first, last),
        _from_to(run, f"{prefix}/finish_ratio/{source}", first, last),
    ]
    if _has_calls(run, prefix):
        row.append(_from_to(run, f"{prefix}/parallel_calls/{source}", first, last))
    return row


def _from_to(run: RunData, name: str, first: int, last: int) -> str:
    values = [f"{run.metrics[step][name]:.2f}" for step in dict.fromkeys((first, last)) if name in run.metrics[step]]
    return " to ".join(values) or "-"


def _time(run: RunData) -> str:
    """Sum and share of each phase; a step's whole is `timing_s/step`, or its phases where that is missing or less."""
    phases = [name for name in run.names("timing_s/") if name != "step"]
    sums = {phase: sum(run.curve(f"timing_s/{phase}").values()) for phase in phases}
    step_s = run.curve("timing_s/step")
    total = sum(
        max(step_s.get(step, 0.0), sum(row.get(f"timing_s/{phase}", 0.0) for phase in phases))
        for step, row in run.metrics.items()
    )
    if not total:
        return ""
    # The time of the steps that no phase has measured.
    sums["rest"] = total - sum(sums.values())
    rows = [
        [phase, f"{seconds:.1f}", f"{seconds / total:.1%}"]
        for phase, seconds in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return "## Time\n\n" + _table(("phase", "seconds", "share"), [*rows, ["**all**", f"{total:.1f}", "100.0%"]])


def _settings(run: RunData) -> str:
    """Those that are always asked for, and all others that are not as they are by default."""
    values = {key: value for key in SETTINGS if (value := run.setting(key)) is not None}
    values |= {key: value for key, value in flattened(run.config) if _is_changed(run, key)}
    rows = [[f"`{key}`", _as_code(str(value))] for key, value in values.items()]
    return "## Settings\n\n" + _table(("setting", "value"), rows) if rows else ""


def _is_changed(run: RunData, path: str) -> bool:
    """Whether a setting that the run has is not as it is by default; one below a free mapping never is."""
    key = leaves(Config).get(path)
    try:
        return key is None or is_changed(run.config, key)
    except KeyError:  # a run of an earlier version, which lacks the setting that this one follows
        return True


def _as_code(text: str) -> str:
    """On one line, and of a long text its beginning."""
    line = text.replace("\n", "\\n")
    shown = line if len(line) <= LONGEST_VALUE else line[:LONGEST_VALUE] + "..."
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def _anomalies(run: RunData) -> str:
    found = [*_failures(run), *_not_finite(run), *_no_signal(run), *_missing_steps(run)]
    return "## Anomalies\n\n" + "\n".join(f"- {line}" for line in found or ["None found."])


def _failures(run: RunData) -> Iterable[str]:
    for prefix in ("env", *SPLITS):
        bad = {step: value for step, value in run.curve(f"{prefix}/failed_ratio").items() if value > 0}
        if bad:
            worst = max(bad, key=lambda step: bad[step])
            yield (
                f"Failed trajectories (`{prefix}/failed_ratio`) in {_steps(list(bad))}; "
                f"most in step {worst}: {bad[worst]:.1%}."
            )


def _not_finite(run: RunData) -> Iterable[str]:
    for name in run.names(""):
        steps = [step for step, row in run.metrics.items() if name in row and row[name] != row[name]]
        if steps:
            yield f"`{name}` was NaN or infinite in {_steps(steps)}."


def _no_signal(run: RunData) -> Iterable[str]:
    high, low = run.curve("critic/advantages/max"), run.curve("critic/advantages/min")
    steps = [step for step in high if high[step] == low.get(step) == 0]
    if steps:
        yield f"All advantages were zero, so nothing could be learned, in {_steps(steps)}."


def _missing_steps(run: RunData) -> Iterable[str]:
    trained = run.curve(TRAIN_METRIC)
    missing = sorted(set(range(min(trained), max(trained))) - set(trained)) if trained else []
    if missing:
        yield f"No training reward was logged in {_steps(missing)}."


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(str(step) for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
    return f"{len(steps)} step{'s' * (len(steps) > 1)} ({shown})"


def _trajectories(run: RunData) -> str:
    """Trajectories of the last validation, or else test, or else the last training step that was saved."""
    for kind in TRAJECTORY_KINDS:
        files = find_trajectories(run.run_dir, kind)
        if not files:
            continue
        step, path = list(files.items())[-1]
        chosen = choose_three(read_trajectories(path, READING_COLUMNS))
        texts = [f"### {caption}\n\n{render_trajectory(row)}" for caption, row in chosen]
        return "\n\n".join([f"## Trajectories to read ({kind}, step {step})", *texts])
    return ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.tracking.report", description="Write report.md and report.png for a run."
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run (trainer.default_local_dir)")
    parser.add_argument(
        "--summary", choices=SPLITS, help="only print the scores of this split before and after training"
    )
    args = parser.parse_args(arguments)

    def run() -> None:
        print(summary(args.run_dir, args.summary) if args.summary else write_report(args.run_dir))

    return exit_status(run, when_interrupted="")


def summary(run_dir: Path | str, split: str) -> str:
    """The scores of each data source, one a line: in the first and in the last evaluation of `split`."""
    run = load_run(run_dir)
    prefix = f"{split}/test_score/"
    lines = []
    for name in run.names(prefix):
        curve = run.curve(prefix + name)
        label = "overall" if name == "mean" else name
        lines.append(f"{label:<16} {curve[min(curve)]:.3f} -> {curve[max(curve)]:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
