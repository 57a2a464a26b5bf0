"""Prints the checkpoint of a run: `.venv/bin/python -m verl.run.last_checkpoint RUN_DIR [--best] [--role actor]`.

Imports neither torch nor Ray. The folder may be of an RL run (`{role}/global_step_N`) or of a warm start
(`global_step_N`). A folder gets its name only when its model is complete.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from program_end import exit_status
from verl.errors import DataError
from verl.process.storage import whole_lines
from verl.run import saved_state
from verl.tracking.jsonl_backend import FILE_NAME as METRICS

ROLES = ("actor", "critic", "ref")
OTHER_ROWS = "sft/other_held_out_rows"  # the metric of a step after which a warm start has other held-out rows, or none


def last_checkpoint(run_dir: Path | str, role: str = "actor") -> Path:
    """The model saved last, in Hugging Face format; after a rollback, the one that the run went back to.

    `role` is actor, critic, or ref (an anchor that moves). Raises DataError when the run has none.
    """
    folder = Path(run_dir).expanduser()
    models = _models(folder / role) or (_models(folder) if role == "actor" else [])
    if models:
        return models[-1]
    give = "give the folder of a run (trainer.default_local_dir)"
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: {give}")
    raise DataError(f"{folder} has no saved {role}: {give} that has saved one")


def best_checkpoint(run_dir: Path | str, role: str = "actor") -> Path:
    """The model with the highest validation score (if several, the latest), or of a warm start the one with the lowest
    held-out loss; it is never removed by rotation.

    Raises DataError when the run has no checkpoint, or none that was validated.
    """
    folder = Path(run_dir).expanduser()
    # A warm start has its models in the run folder itself, not in a role's.
    if last_checkpoint(folder, role).parent == folder and (losses := held_out_losses(folder)):
        return folder / f"{saved_state.PREFIX}{min(losses, key=lambda step: (losses[step], step))}"
    step = _best_step(folder)
    if step is None:
        raise DataError(
            f"{folder} has no validated checkpoint: a step must be saved (trainer.save_freq) and validated "
            "(trainer.test_freq); leave out --best for the last one"
        )
    path = folder / role / f"{saved_state.PREFIX}{step}"
    if not path.is_dir():
        raise DataError(f"{path}, the best checkpoint, no longer exists: leave out --best for the last one")
    return path


def held_out_losses(run_dir: Path) -> dict[int, float]:
    """Step -> held-out loss of a warm start, in nats per token, from the first step on; {} for other runs.

    Those from before the held-out rows were others are left out.
    """
    losses: dict[int, float] = {}
    for row in map(json.loads, whole_lines(run_dir / METRICS)):
        if OTHER_ROWS in row:
            losses = {}
        if row["step"] > 0 and "sft/val_loss" in row:
            losses[row["step"]] = row["sft/val_loss"]
    return losses


def _models(folder: Path) -> list[Path]:
    return [path for path in saved_state.step_folders(folder) if (path / "config.json").is_file()]


def _best_step(run_dir: Path) -> int | None:
    for state in reversed(list(saved_state.saved(run_dir))):
        try:
            best = saved_state.read_progress(state).get("best")
        except (OSError, json.JSONDecodeError):
            continue  # a damaged state: the one before it knows
        return None if best is None else int(best)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the checkpoint that the arguments ask for; returns the exit status, as `exit_status` says."""
    parser = argparse.ArgumentParser(
        prog="python -m verl.run.last_checkpoint",
        description="Print the folder of the last (or best) model of a run.",
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run (trainer.default_local_dir)")
    parser.add_argument("--best", action="store_true", help="the one with the best validation score")
    parser.add_argument("--role", choices=ROLES, default="actor", help="which model (%(default)s)")
    args = parser.parse_args(argv)
    find = best_checkpoint if args.best else last_checkpoint
    return exit_status(lambda: print(find(args.run_dir, args.role)), when_interrupted="nothing was printed")


if __name__ == "__main__":
    sys.exit(main())
