"""Saved models of a run: `{run folder}/{actor,critic,ref}/global_step_N`, each in Hugging Face format."""

from __future__ import annotations

from pathlib import Path

from verl.trainer.roles import ActorGroup, CriticGroup


class Checkpoints:
    """Saves and loads the roles of a run together. `steps` are those saved by this run, oldest first."""

    def __init__(self, run_dir: Path, actor: ActorGroup, critic: CriticGroup | None, with_anchor: bool) -> None:
        """`with_anchor`: there is an anchor that moves, so it is saved too."""
        self.run_dir = run_dir
        self.actor = actor
        self.critic = critic
        self.with_anchor = with_anchor
        self.steps: list[int] = []

    def save(self, step: int) -> None:
        """Raises CheckpointError, and leaves earlier checkpoints as they are."""
        self.actor.save(self.path("actor", step))
        if self.with_anchor:
            self.actor.save(self.path("ref", step), of="anchor")
        if self.critic is not None:
            self.critic.save(self.path("critic", step))
        self.steps.append(step)

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
