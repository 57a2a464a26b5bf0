"""The report of a run: `.venv/bin/python -m verl.tracking.report RUN_DIR` writes it beside its metrics.

It reads only what the run left on disk (metrics.jsonl, config.yaml, trajectories/), so it can be made at any time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from verl.errors import VerlError
from verl.process.storage import whole_file
from verl.tracking.learning_curve import SPLITS, TRAIN_METRIC, draw_learning_curve
from verl.tracking.run_data import RunData, load_run
from verl.tracking.trajectory_store import Kind, find_trajectories, read_trajectories
from verl.tracking.trajectory_text import READING_COLUMNS, choose_three, render_trajectory

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
    names = run.names(f"{prefix}/test_score/")
    sources = [*sorted(name for name in names if name != "mean"), *(["mean"] if "mean" in names else [])]
    rows = [row for source in sources if (row := _score_row(run, prefix, source))]
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
    )
    return f"## Before and after: {SPLITS[prefix]}\n\n" + _table(header, rows)


def _score_row(run: RunData, prefix: str, source: str) -> list[str]:
    curve = run.curve(f"{prefix}/test_score/{source}")
    if not curve:
        return []
    first, last = min(curve), max(curve)
    count_name = f"{prefix}/num_questions" + ("" if source == "mean" else f"/{source}")
    count = run.metrics[last].get(count_name)
    change = f"{curve[last] - curve[first]:+.3f}" if last != first else "-"
    return [
        "**all**" if source == "mean" else source,
        "-" if count is None else f"{count:.0f}",
        *(f"{curve[first]:.3f}", str(first), f"{curve[last]:.3f}", str(last), change),
        _from_to(run, f"{prefix}/searches_per_question/{source}", first, last),
        _from_to(run, f"{prefix}/finish_ratio/{source}", first, last),
    ]


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
    sums["rest"] = total - sum(sums.values())
    rows = [
        [phase, f"{seconds:.1f}", f"{seconds / total:.1%}"]
        for phase, seconds in sorted(sums.items(), key=lambda item: -item[1])
    ]
    return "## Time\n\n" + _table(("phase", "seconds", "share"), [*rows, ["**all**", f"{total:.1f}", "100.0%"]])


def _settings(run: RunData) -> str:
    values = [(key, run.setting(key)) for key in SETTINGS]
    rows = [[f"`{key}`", f"`{value}`"] for key, value in values if value is not None]
    return "## Settings\n\n" + _table(("setting", "value"), rows) if rows else ""


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
    try:
        print(summary(args.run_dir, args.summary) if args.summary else write_report(args.run_dir))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


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
