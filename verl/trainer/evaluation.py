"""Validations and tests of a run: each prompt answered once, scored, and stored."""

from __future__ import annotations

from functools import partial

from verl.config import Config
from verl.config.rules.predicates import has_anchor
from verl.data.prompts import PromptSource
from verl.process.startup import phase
from verl.rollout.manager import RolloutManager
from verl.tracking.spans import Timer
from verl.tracking.trajectory_store import Kind
from verl.trainer.metrics.batch import validation_metrics
from verl.trainer.sampling.rollout_source import RolloutSource
from verl.trainer.sampling.scoring import Scorer
from verl.trainer.start_checks.prompts import PromptSets
from verl.trainer.stored_values import TrajectoryFiles
from verl.workers.roles import ActorGroup

SPLITS: dict[Kind, str] = {"val": "validating", "val_ref": "validating the anchor", "test": "testing"}


class Evaluator:
    """Evaluates the weights in the engines, which must be idle."""

    def __init__(
        self, config: Config, prompts: PromptSets, rollouts: RolloutManager, scorer: Scorer, files: TrajectoryFiles
    ) -> None:
        self.config, self.prompts, self.rollouts, self.scorer, self.files = config, prompts, rollouts, scorer, files

    def policy_is_due(self, step: int, last: bool) -> bool:
        """Whether the policy is validated after this step."""
        return last or is_due(self.config.trainer.test_freq, step)

    def anchor_is_due(self, step: int) -> bool:
        return has_anchor(self.config) and is_due(self.config.trainer.eval_ref_policy_freq, step)

    def validate(self, step: int, timed: Timer) -> dict[str, float]:
        with timed("testing"):
            return self._evaluate(self.prompts.val, "val", step)

    def test(self, step: int, timed: Timer) -> dict[str, float]:
        """Evaluate on the held-out test files, before the first step and after the last one."""
        if self.prompts.test is None:
            return {}
        with timed("testing"):
            return self._evaluate(self.prompts.test, "test", step)

    def validate_anchor(self, step: int, actor: ActorGroup, source: RolloutSource, timed: Timer) -> dict[str, float]:
        """Validate with the anchor's weights in the engines, and load the policy's again afterwards."""
        with timed("testing_ref_policy"):
            self.rollouts.load_weights(partial(actor.publish_weights, step, of="anchor"))
            metrics = self._evaluate(self.prompts.val, "val_ref", step)
            source.load(step)
        return metrics

    def _evaluate(self, prompts: PromptSource, split: Kind, step: int) -> dict[str, float]:
        rows = prompts.all()
        with phase(f"{SPLITS[split]} on {len(rows)} prompts"):
            trajectories = self.rollouts.collect(rows, 1, step, mode="val")
            self.scorer.score(trajectories, validate=True)
        self.files.write(trajectories, split, step)
        return validation_metrics(trajectories, split)


def is_due(frequency: int, step: int) -> bool:
    """Whether something that happens every `frequency` steps (-1: never) happens after this step."""
    return frequency > 0 and step % frequency == 0
