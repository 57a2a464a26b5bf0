"""Checkpoints of a run: models that anyone can load, and the state from which the run itself goes on.

`{run folder}/{actor,critic,ref}/global_step_N` are in Hugging Face format; `verl.trainer.saved_state` describes
`{run folder}/state/global_step_N`.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, VerlError
from verl.storage import Digests
from verl.trainer import saved_state
from verl.trainer.roles import ActorGroup, CriticGroup

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves and loads the roles of a run together. `steps` are those saved, oldest first.

    Of states and models together `max_to_keep` are kept (None: all), and the one of the best validation besides.
    """

    def __init__(
        self,
        run_dir: Path,
        actor: ActorGroup,
        critic: CriticGroup | None,
        with_anchor: bool,
        max_to_keep: int | None = None,
    ) -> None:
        """`with_anchor`: there is an anchor that moves, so it is saved too."""
        self.run_dir = run_dir
        self.with_anchor = with_anchor
        self.max_to_keep = max_to_keep
        self.actor = actor
        self.critic = critic
        self.steps: list[int] = []
        self.best: tuple[float, int] | None = None  # validation score, step
        self._writing: tuple[Path, Path] | None = None  # temporary and final name

    def save(self, step: int) -> None:
        """The models. Raises CheckpointError, and leaves earlier ones as they are."""
        self.actor.save(self.path("actor", step))
        if self.with_anchor:
            self.actor.save(self.path("ref", step), of="anchor")
        if self.critic is not None:
            self.critic.save(self.path("critic", step))
        self.steps.append(step)

    def save_state(self, step: int, progress: dict[str, Any], score: float | None) -> None:
        """All that `resume` needs, and `progress` with it; written in the background.

        `score` is the validation's, if the step had one. Raises CheckpointError, also when the state before this one
        could not be written.
        """
        self.settle(wait=True)
        if score is not None and (self.best is None or score >= self.best[0]):
            self.best = (score, step)
        target = saved_state.state_path(self.run_dir, step)
        temporary = saved_state.begin(target, list(self._groups()), progress | self._own_progress(step))
        for role, group in self._groups().items():
            group.start_saving_state(temporary / role)
        self._writing = (temporary, target)

    def settle(self, wait: bool, timeout_s: float | None = None) -> None:
        """Give a state that is on the disk its name, and remove what is too old.

        `wait` for one that is being written, at most `timeout_s` seconds where that is given. Raises VerlError when it
        could not be written; then it is removed.
        """
        if self._writing is None:
            return
        temporary, target = self._writing
        if not wait and not all(group.state_is_saved() for group in self._groups().values()):
            return
        try:
            saved_state.finish(temporary, target, self._written(timeout_s))
        except VerlError:
            self._writing = None
            saved_state.discard(temporary)
            raise
        self._writing = None
        self._rotate()

    def _written(self, timeout_s: float | None) -> Digests:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        digests: Digests = {}
        for role, group in self._groups().items():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            digests |= {f"{role}/{name}": found for name, found in group.saved_state(left_s).items()}
        return digests

    def resume(self, path: Path) -> dict[str, Any]:
        """Put a verified state back; returns the progress that was saved with it. Raises CheckpointError."""
        for role, group in self._groups().items():
            if not (path / role).is_dir():
                raise CheckpointError(f"{path} has no {role}: it is of a run with other roles; start a new run")
            group.load_state(path / role)
        progress = saved_state.read_progress(path)
        self.steps = [step for step in progress["saved"] if self.path("actor", step).is_dir()]
        self.best = tuple(progress["best"]) if progress.get("best") else None
        return progress

    def load(self, step: int) -> None:
        """Put the weights of a saved step back; optimizers start anew. What was saved later counts no more."""
        self.actor.load(self.path("actor", step))
        if self.with_anchor:
            self.actor.load(self.path("ref", step), of="anchor")
        if self.critic is not None:
            self.critic.load(self.path("critic", step))
        self.steps = [saved for saved in self.steps if saved <= step]

    def path(self, role: str, step: int) -> Path:
        return self.run_dir / role / f"global_step_{step}"

    def _own_progress(self, step: int) -> dict[str, Any]:
        return {"step": step, "saved": self.steps, "best": self.best}

    def _groups(self) -> dict[str, ActorGroup | CriticGroup]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def _rotate(self) -> None:
        if self.max_to_keep is None:
            return
        kept = set(self.steps[-self.max_to_keep :]) | ({self.best[1]} if self.best else set())
        for step in self.steps:
            if step not in kept:
                for role in ("actor", "critic", "ref", saved_state.FOLDER):
                    shutil.rmtree(self.path(role, step), ignore_errors=True)
        self.steps = [step for step in self.steps if step in kept]
