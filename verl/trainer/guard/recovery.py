"""What a run does about an alarm of the collapse guard: warn, stop, or go back to a good checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from verl.algorithms.kl import KLController
from verl.config.sections.trainer import CollapseGuardConfig
from verl.errors import TrainingCollapsed
from verl.run.checkpoints import Checkpoints
from verl.trainer.guard.collapse_guard import Alarm, CollapseGuard, good_checkpoint

log = logging.getLogger(__name__)

LR_FACTOR = 0.5


class Recovery:
    """Acts on the guard's alarms."""

    def __init__(self, config: CollapseGuardConfig, checkpoints: Checkpoints, kl_weight: KLController) -> None:
        self.guard = CollapseGuard(config)
        self.checkpoints = checkpoints
        self.kl_weight = kl_weight
        self._alarm: Alarm | None = None
        self._num_watched = 0

    def watch(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Check a step's metrics. Returns the guard's own metrics, to be logged with them.

        Once the first alarms could be due, a limit without a metric is warned of: its run only looks healthy.
        """
        self._alarm = self.guard.observe(metrics, step)
        self._num_watched += 1
        if self._num_watched == self.guard.config.patience:
            for name, metric in self.guard.not_seen().items():
                log.warning("trainer.collapse_guard.%s is not watched: no step so far has had %s", name, metric)
        return self.guard.metrics()

    def act(self, step: int) -> int | None:
        """Act on what `watch` found in this step. Returns the step whose weights were restored, None if none were.

        Raises TrainingCollapsed, which names the last good checkpoint, when the run should end.
        """
        alarm = self._alarm
        if alarm is None:
            return None
        if alarm.action == "warn":
            log.warning("step %d: %s", step, alarm.message)
            return None
        good = good_checkpoint(self.checkpoints.steps, alarm.first_bad_step)
        if good is None:
            advice = "There is no checkpoint from before that; set trainer.save_freq to have one."
            raise TrainingCollapsed(f"step {step}: {alarm.message} {advice}")
        if alarm.action == "stop":
            advice = f"The last good checkpoint is {self.checkpoints.path('actor', good)}."
            raise TrainingCollapsed(f"step {step}: {alarm.message} {advice}")
        log.warning("step %d: %s Going back to step %d with half the learning rate.", step, alarm.message, good)
        self.checkpoints.load(good)
        self.checkpoints.actor.scale_lr(LR_FACTOR)
        if self.checkpoints.critic is not None:
            self.checkpoints.critic.scale_lr(LR_FACTOR)
        # An adaptive weight followed the KL of the collapsed policy.
        self.kl_weight.value = self.checkpoints.kl_weights.get(good, self.kl_weight.value)
        self.guard.reset()
        return good
