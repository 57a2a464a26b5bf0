"""Which saved state a run goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from verl.config.trainer import TrainerConfig
from verl.errors import CheckpointError
from verl.trainer import saved_state

log = logging.getLogger(__name__)


def state_to_resume(trainer: TrainerConfig) -> Path | None:
    """A verified folder, or None for a new run. What `auto` skips is logged with the reason.

    Raises CheckpointError when the named one cannot be used, and when `auto` finds states of which none verifies: a new
    run in the same folder would bury the old one.
    """
    if trainer.resume_mode == "resume_path":
        path = _state_of(Path(trainer.resume_from_path or "").expanduser())
        saved_state.verify(path)
        return path
    if trainer.resume_mode != "auto":
        return None
    run_dir = Path(trainer.default_local_dir)
    found, skipped = saved_state.newest(run_dir)
    for reason in skipped:
        log.warning("resume: skipped a saved state: %s", reason)
    if found is None and skipped:
        raise CheckpointError(
            f"no state in {run_dir / saved_state.FOLDER} can be used (the newest: {skipped[0]}); start anew by "
            "trainer.resume_mode=disable and another trainer.default_local_dir"
        )
    return found


def goes_on(trainer: TrainerConfig) -> bool:
    """Whether the run folder's metrics are those of this run."""
    if trainer.resume_mode == "disable":
        return False
    run_dir = Path(trainer.default_local_dir)
    if trainer.resume_mode == "resume_path":
        return _state_of(Path(trainer.resume_from_path or "").expanduser()).parents[1].resolve() == run_dir.resolve()
    return any(saved_state.saved(run_dir))


def _state_of(path: Path) -> Path:
    """The state of a step, named by its own folder or by the actor's, as published."""
    if path.parent.name in ("actor", "critic", "ref"):
        path = path.parents[1] / saved_state.FOLDER / path.name
    if not path.is_dir():
        raise CheckpointError(f"trainer.resume_from_path: there is no saved state {path}")
    return path
