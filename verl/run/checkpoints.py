"""Checkpoints of a run: models that anyone can load, and the state from which the run itself resumes.

`{run folder}/{actor,critic,ref}/global_step_N` are in Hugging Face format; `verl.run.saved_state` describes
`{run folder}/state/global_step_N`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.errors import CheckpointError, Stalled, VerlError
from verl.process.storage import Digests
from verl.run import saved_state
from verl.run.saved_state import saving
from verl.single_controller.folder_copies import FolderCopies, nothing_to_bring, require_arrived
from verl.single_controller.waiting import wait_beside
from verl.workers.roles import ActorGroup, CriticGroup, RoleGroup

log = logging.getLogger(__name__)

WRITERS_S = 600.0  # at most, for the other ranks when one could not write its part of a state


@dataclass(eq=False)
class Checkpoints:
    """Saves and loads the roles of a run together. `steps` are those saved, oldest first.

    The latest `max_to_keep` steps are kept (None: all), and in addition the one with the best validation. What was
    saved between a good step and the rollback to it is `abandoned`: it is neither counted nor the best, and is removed
    as soon as there is a state from after the rollback (with `max_to_keep` None it stays on the disk).

    `with_anchor`: there is an anchor that moves, so it is saved too. `copies`: the copies of the run folder on nodes
    that do not share it. `model_bytes`: approximate size of a saved model, if known, so that the first save can say how
    long it will take.
    """

    run_dir: Path
    actor: ActorGroup
    critic: CriticGroup | None
    with_anchor: bool
    max_to_keep: int | None = None
    copies: FolderCopies | None = None
    model_bytes: int | None = None

    def __post_init__(self) -> None:
        self.steps: list[int] = []
        self.scores: dict[int, float] = {}  # validation scores by saved step
        self.kl_weights: dict[int, float] = {}  # of a KL in the reward, by saved step
        self.abandoned: list[int] = []
        self._writing: tuple[int, Path] | None = None  # step, and temporary name of its state
        self._arriving: Future[Digests] | None = None  # what others have written of it

    @property
    def best(self) -> int | None:
        """The saved step with the highest validation score; if several have it, the latest."""
        return max(self.scores, key=lambda step: (self.scores[step], step), default=None)

    def save(self, step: int) -> None:
        """Save the models. On failure, raises CheckpointError and leaves earlier ones unchanged."""
        for name, role, of in self._models():
            path = self.path(name, step)
            with saving(path, self.model_bytes):
                role.save(path, of)
        if self.copies:  # rank 0 may be on another node
            for name, _, _ in self._models():
                self.copies.bring(self.path(name, step))
        self.steps.append(step)
        self.abandoned = [other for other in self.abandoned if other != step]

    def save_state(self, step: int, progress: dict[str, Any], score: float | None) -> None:
        """Save all that `resume` needs, with `progress`, in the background.

        `score`: validation score of the saved weights, if they were validated. Raises CheckpointError, also when the
        state before this one could not be written.
        """
        # The state before must be complete: the progress says which states there are.
        self.settle(wait=True)
        if score is not None:
            self.scores[step] = score
        if "kl_weight" in progress:
            self.kl_weights[step] = progress["kl_weight"]
        own_progress = {
            "step": step,
            "best": self.best,
            "saved": self.steps,
            "abandoned": self.abandoned,
            "scores": sorted(self.scores.items()),
            "kl_weights": sorted(self.kl_weights.items()),
        }

        # Every role begins to write into a temporary folder, which `settle` renames when all have written.
        target = saved_state.state_path(self.run_dir, step)
        temporary = saved_state.begin(target, list(self._groups()), progress | own_progress)
        try:
            if self.copies:
                self.copies.make([temporary / role for role in self._groups()])
            for role, group in self._groups().items():
                group.start_saving_state(temporary / role)
        except VerlError as error:
            self._give_up(temporary, error)
            raise
        self._writing = (step, temporary)

    def settle(self, wait: bool, timeout_s: float | None = None) -> None:
        """Rename a completely written state, and remove old ones.

        `wait` for one that is being written, at most `timeout_s` seconds if given. Raises VerlError, and removes the
        state, when it could not be written.
        """
        if self._writing is None:
            return
        step, temporary = self._writing
        # After a step the run goes on while files are still being written, or copied here from other nodes.
        if not wait and not (self._nobody_writes() and self._bringing(temporary).done()):
            return
        path = saved_state.state_path(self.run_dir, step)
        # A state gets its final name only when all files are here as their ranks wrote them.
        try:
            with saving(path):
                written = self._written(timeout_s)
                self._require_arrived(temporary, written, timeout_s)
            saved_state.finish(temporary, path, written)
        except VerlError as error:
            self._give_up(temporary, error, timeout_s)
            raise
        # Old ones are removed only now that a newer one is complete.
        self._writing = self._arriving = None
        self._rotate(step)

    def _bringing(self, temporary: Path) -> Future[Digests]:
        """The copying here of what ranks have written on other nodes; it is begun when they are all done."""
        if self._arriving is None:
            self._arriving = self.copies.begin_bringing(temporary) if self.copies else nothing_to_bring()
        return self._arriving

    def _require_arrived(self, temporary: Path, written: Digests, timeout_s: float | None) -> None:
        try:
            require_arrived(temporary, self._bringing(temporary).result(timeout_s), written)
        except TimeoutError as error:
            raise Stalled(f"{temporary} was not copied here from its nodes within {timeout_s} s") from error

    def _give_up(self, temporary: Path, error: VerlError, timeout_s: float | None = None) -> None:
        """Remove a state that cannot be written. Ranks that could write their part are waited for, or they would fill
        the folder again; those that do not answer are not.
        """
        self._writing = self._arriving = None
        deadline = time.monotonic() + (WRITERS_S if timeout_s is None else timeout_s)
        with suppress(VerlError):
            while isinstance(error, CheckpointError) and not self._nobody_writes() and time.monotonic() < deadline:
                time.sleep(0.05)
        saved_state.discard(temporary)
        if self.copies:
            self.copies.remove(temporary)

    def _nobody_writes(self) -> bool:
        return all(group.state_is_saved() for group in self._groups().values())

    def _written(self, timeout_s: float | None) -> Digests:
        """The files that all roles have written. An error of one is raised while another is still writing."""
        calls = {role: group.begin_saved_state(timeout_s) for role, group in self._groups().items()}
        written = {
            role: wait_beside(call, [other for other in calls.values() if other is not call])
            for role, call in calls.items()
        }
        return {f"{role}/{name}": found for role in written for rank in written[role] for name, found in rank.items()}

    def resume(self, path: Path) -> dict[str, Any]:
        """Load a verified state; returns the progress that was saved with it. Raises CheckpointError."""
        saved_state.require_roles(path, self._groups())
        with self._on_all_nodes(path):
            for role, group in self._groups().items():
                group.load_state(path / role)
        progress = saved_state.read_progress(path)
        # Models may have been removed since the state was saved.
        self.steps = [step for step in progress["saved"] if self.path("actor", step).is_dir()]
        self.scores = {step: score for step, score in progress.get("scores", []) if step in self.steps}
        self.kl_weights = dict(progress.get("kl_weights", []))  # a list that runs saved earlier do not have
        if "kl_weight" in progress:
            self.kl_weights[progress["step"]] = progress["kl_weight"]
        self.abandoned = progress.get("abandoned", [])
        return progress

    def load(self, step: int) -> None:
        """Restore the weights of a saved step; optimizers are reset. What was saved later is abandoned."""
        models = [(self.path(name, step), role, of) for name, role, of in self._models()]
        with self._on_all_nodes(*(path for path, _, _ in models if path.is_dir())):
            for path, role, of in models:
                role.load(path, of)
        self.abandoned += [saved for saved in self.steps if saved > step]
        self.steps = [saved for saved in self.steps if saved <= step]
        self.scores = {saved: score for saved, score in self.scores.items() if saved <= step}
        self.kl_weights = {saved: weight for saved, weight in self.kl_weights.items() if saved <= step}

    def path(self, role: str, step: int) -> Path:
        return self.run_dir / role / f"global_step_{step}"

    def _on_all_nodes(self, *folders: Path) -> AbstractContextManager[None]:
        """Context in which ranks on all nodes can read the folders."""
        return self.copies.on_all_disks(*folders) if self.copies else nullcontext()

    def _models(self) -> Iterator[tuple[str, RoleGroup, str | None]]:
        """The models: the folder of each, the role that has it, and its name in that role."""
        yield "actor", self.actor, None
        if self.with_anchor:
            yield "ref", self.actor, "anchor"
        if self.critic is not None:
            yield "critic", self.critic, None

    def _groups(self) -> dict[str, ActorGroup | CriticGroup]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def _rotate(self, step: int) -> None:
        """Remove what is too old now that the state of `step` is on the disk; a later one may be none yet."""
        if self.max_to_keep is None:
            return
        whole = [saved for saved in self.steps if saved <= step]
        kept = {*whole[-self.max_to_keep :], self.best}
        self._remove([saved for saved in whole if saved not in kept])
        self._remove([saved for saved in self.abandoned if saved < step])

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            for role in ("actor", "critic", "ref", saved_state.FOLDER):
                shutil.rmtree(self.path(role, step), ignore_errors=True)
            self.scores.pop(step, None)
            self.kl_weights.pop(step, None)
        self.steps = [step for step in self.steps if step not in steps]
        self.abandoned = [step for step in self.abandoned if step not in steps]
