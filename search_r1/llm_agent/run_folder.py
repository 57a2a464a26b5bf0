"""Find the settings and checkpoints in the folder of a training run."""

from __future__ import annotations

from pathlib import Path

from verl.errors import ConfigError, DataError
from verl.run.last_checkpoint import best_checkpoint, last_checkpoint
from verl.run.saved_state import PREFIX, step_folders
from verl.tracking.tracker import CONFIG_FILE


def config_file_of(run_dir: Path) -> Path:
    """The run's config file. Raises `ConfigError` if the folder is not that of a run."""
    folder = run_dir.expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--run {run_dir}: there is no such folder; give that of a run (trainer.default_local_dir)")
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"--run {run_dir}: no {CONFIG_FILE} in it; give the folder of a run{_run_around(folder)}")
    return folder / CONFIG_FILE


def checkpoint_of(run_dir: Path, which: str) -> Path:
    """The policy's `best` or `last` checkpoint, or that of a step. Raises `ConfigError`, or `DataError` without it."""
    if which == "best":
        return best_checkpoint(run_dir)
    last = last_checkpoint(run_dir)
    if which == "last":
        return last
    if not which.isdigit():
        raise ConfigError(f"--checkpoint {which}: give best, last, or the number of a step")
    path = last.parent / f"{PREFIX}{int(which)}"
    if not (path / "config.json").is_file():
        steps = ", ".join(found.name.removeprefix(PREFIX) for found in step_folders(last.parent))
        raise DataError(f"--checkpoint {which}: {run_dir} has no such step saved; there are {steps}")
    return path


def _run_around(folder: Path) -> str:
    """For somebody who gave a checkpoint instead."""
    above = next((parent for parent in folder.absolute().parents[:2] if (parent / CONFIG_FILE).is_file()), None)
    return "" if above is None else f", perhaps {above}"
