"""What a run prints at its end: its results, where everything is, and which command shows it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.errors import DataError
from verl.run.last_checkpoint import last_checkpoint
from verl.tracking.learning_curve import SPLITS, TRAIN_METRIC
from verl.tracking.run_data import RunData, load_run

WIDTH = 14


def ending(run_dir: Path, report: Path) -> str:
    """A line for each thing. Raises DataError for a folder without metrics."""
    run = load_run(run_dir)
    folder = shlex.quote(str(run_dir))
    lines = [f"done: {_steps(run)}"]
    lines += [f"  {name:<{WIDTH}}{value}" for name, value in (*_scores(run), *_model(run_dir))]
    program = _program()
    shown = {
        "report": report,
        "trajectories": f"{program} view {folder}",
        "a question": f'{program} infer --run {folder} --question "..."',
    }
    return "\n".join([*lines, *(f"  {name:<{WIDTH}}{value}" for name, value in shown.items())])


def _program() -> str:
    """`search-r1`, as it can be typed here: of this environment, which may not be the shell's."""
    path = Path(sys.executable).with_name("search-r1")
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def _steps(run: RunData) -> str:
    seconds = run.curve("timing_s/step")
    if not seconds:
        return "validated, nothing trained"
    minutes, rest = divmod(round(sum(seconds.values())), 60)
    return f"{len(seconds)} step{'s' * (len(seconds) > 1)} in {minutes} min {rest} s, without validation and saving"


def _scores(run: RunData) -> Iterator[tuple[str, str]]:
    """The training reward, and the score of every split, as they began and ended."""
    for name, metric in (("reward", TRAIN_METRIC), *((split, f"{split}/test_score/mean") for split in SPLITS)):
        curve = run.curve(metric)
        if curve:
            first, last = min(curve), max(curve)
            later = f" -> {curve[last]:.3f} (step {last})" if last != first else ""
            yield name, f"{curve[first]:.3f} (step {first}){later}"


def _model(run_dir: Path) -> Iterator[tuple[str, str]]:
    try:
        yield "model", str(last_checkpoint(run_dir))
    except DataError:  # nothing was trained
        return
