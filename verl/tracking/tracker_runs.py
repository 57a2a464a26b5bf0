"""Which runs of W&B and MLflow belong to a run folder: a run that is resumed there continues them."""

from __future__ import annotations

import json
from pathlib import Path

from verl.process.storage import whole_file

FILE_NAME = "trackers.json"


def tracker_run(run_dir: Path, tracker: str) -> str | None:
    """The identifier that `keep_tracker_run` has kept; None without one."""
    return _kept(run_dir).get(tracker)


def keep_tracker_run(run_dir: Path, tracker: str, identifier: str) -> None:
    """Keep the identifier of the run at `tracker`. Raises StorageError."""
    kept = _kept(run_dir) | {tracker: identifier}
    with whole_file(run_dir / FILE_NAME) as temporary:
        temporary.write_text(json.dumps(kept) + "\n", encoding="utf-8")


def forget_tracker_runs(run_dir: Path) -> None:
    """Let the next runs at the trackers be new ones."""
    (run_dir / FILE_NAME).unlink(missing_ok=True)


def _kept(run_dir: Path) -> dict[str, str]:
    try:
        found = json.loads((run_dir / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
