"""The RL loop: collect, estimate, update, sync, validate, save."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from verl.config import Config
from verl.config.rules.predicates import max_staleness, stores_token_values, truncates_sampling
from verl.engine.micro_batches import split_rows
from verl.errors import StorageError, TrainingCollapsed
from verl.process.interrupts import StopAfterStep, interrupts_at_the_end
from verl.process.startup import phase
from verl.protocol import TrainBatch
from verl.tracking.report import write_report
from verl.tracking.spans import Timer
from verl.tracking.tracker import samples_to_show
from verl.trainer.ending import finish_writing_on_failure
from verl.trainer.estimates import for_losses
from verl.trainer.evaluation import is_due
from verl.trainer.metrics.batch import step_metrics
from verl.trainer.metrics.health import health_metrics
from verl.trainer.sampling.collection import Collected, staleness_metrics
from verl.trainer.start_checks.inputs import Inputs
from verl.trainer.starting import Run
from verl.trainer.stored_values import token_values
from verl.workers.roles import memory_metrics

log = logging.getLogger(__name__)

SCORE = "val/test_score/mean"


class RLTrainer:
    """The loop over what `run` has. `device` is "cpu" or "cuda"."""

    def __init__(self, config: Config, device: str, inputs: Inputs) -> None:
        self.config = config
        self.run = Run(config, device, inputs)
        self.timer = Timer(self.run.tracker.now_in)
        self._stopped_at_end = False

    def fit(self) -> Path:
        """Train to the last step. Returns the path of the report, which is also written for a run that collapsed."""
        run, trainer = self.run, self.config.trainer
        try:
            with finish_writing_on_failure(run.run_dir, run.checkpoints, run.writer):
                # Before training only a run's initial weights are validated; `val_only` validates whatever was loaded.
                if trainer.val_only or (trainer.val_before_train and not run.steps_done) or run.evaluation_is_left:
                    self._evaluate()
                # SIGTERM lets the step in hand finish, and then ends the run with a saved state.
                with StopAfterStep(trainer.sigterm_grace_s) as self.stop:
                    for step in range(run.steps_done + 1, 1 if trainer.val_only else run.total_steps + 1):
                        started = time.monotonic()
                        self._step(step, last=step == run.total_steps)
                        self._end_if_asked(step)
                        if step > run.steps_done + 1 and trainer.save_freq != 1:  # the first one takes longer
                            self.stop.compare(time.monotonic() - started)
        except TrainingCollapsed:
            # A run that collapsed gets its report, too; that it collapsed is what is raised, even without one.
            try:
                self._finish()
            except StorageError as error:
                log.warning("the report could not be written: %s", error)
            raise
        return self._finish()

    def shutdown(self) -> None:
        """Stop every process that this run started, whatever state it is in."""
        self.run.shutdown()

    def _evaluate(self) -> None:
        """Validate and test the weights that were loaded. What SIGTERM has left out at the end is then done, so that it
        joins the state.
        """
        run = self.run
        metrics = run.evaluator.validate(run.steps_done, self.timer)
        self._log(metrics | run.evaluator.test(run.steps_done, self.timer), run.steps_done)
        if run.evaluation_is_left and run.steps_done in run.checkpoints.steps:
            run.writer.drain()
            run.checkpoints.save_state(run.steps_done, self._progress(), metrics.get(SCORE))
            run.checkpoints.settle(wait=True)

    def _step(self, step: int, last: bool) -> None:
        """Do one step of the run: train, validate, save, log."""
        run, timed = self.run, self.timer
        is_first = step == run.steps_done + 1  # whose progress is announced: it takes longer than the others
        with timed("step"), phase(f"step {step} of {run.total_steps}") if is_first else nullcontext():
            collected, trained, metrics = self.train_step(step)
        metrics |= run.performance.metrics(timed, collected.work, trained)
        metrics |= self._validate(step)
        # Before anything is saved: a checkpoint has the weights that the run continues with, and their score.
        rolled_back = self._watch(metrics, step)
        score = None if rolled_back else metrics.get(SCORE)
        save = last or rolled_back or self.stop.requested or is_due(self.config.trainer.save_freq, step)
        if save:
            with timed("save_checkpoint"):
                self._save_models(step)
        # SIGTERM leaves no time for a test: who resumes the run, which has then no step left, gets validation and test.
        self._stopped_at_end = last and self.stop.requested
        if last and not self._stopped_at_end:
            metrics |= run.evaluator.test(step, timed)
        run.tracker.log_samples(samples_to_show(self.config.trainer, collected.sampled, step, run.decode), step)
        with interrupts_at_the_end():  # a step that is logged as saved has a state from which it resumes
            self._log(metrics, step)
            if save:
                run.writer.drain()  # the files of the test, of the last step
                run.checkpoints.save_state(step, self._progress(), score)
        run.checkpoints.settle(wait=last)

    def _save_models(self, step: int) -> None:
        self.run.writer.drain()  # a run that resumes after this step does not write its files again
        self.run.checkpoints.save(step)

    def _end_if_asked(self, step: int) -> None:
        """End after a step within which SIGTERM has come, with a state from which the run resumes."""
        is_complete = step == self.run.total_steps and not self._stopped_at_end
        if not self.stop.requested or is_complete:
            return
        checkpoints = self.run.checkpoints
        if step not in checkpoints.steps:  # the signal came after it was decided whether to save
            self._save_models(step)
            checkpoints.save_state(step, self._progress(), None)
        checkpoints.settle(wait=True)
        raise KeyboardInterrupt

    def train_step(self, step: int) -> tuple[Collected, TrainBatch, dict[str, float]]:
        """Collect, estimate, update, sync. Returns what was sampled, what of it was trained on, and metrics."""
        # Sampled trajectories become a batch with advantages; the losses read only those rows that an update keeps.
        run, timed = self.run, self.timer
        collected = run.source.take(step, timed)
        batch = collected.batch
        metrics = run.estimator.prepare(batch, run.actor, run.critic, timed)
        trained = for_losses(batch, run.updates.kept(collected.trained))

        # The engines get the new weights as soon as the policy has them, while the critic may still train.
        def sync() -> None:
            policy_is_due, anchor_is_due = self._due(step)
            run.source.renew(step, timed, hold=policy_is_due or anchor_is_due)

        metrics |= run.updates.run(batch, trained, step, timed, sync)

        # Metrics, and the files of the step, which nothing of the training waits for.
        metrics |= step_metrics(
            collected.sampled,
            trained,
            seconds=timed.seconds,
            partitions=split_rows(trained.lengths_B, run.num_shares),
            max_prompt_length=self.config.data.max_start_length,
            policy_T=batch.tokens["loss_mask"],
            num_sampled_tokens=collected.work.num_policy_tokens,
        )
        metrics |= staleness_metrics(collected.sampled, step, max_staleness(self.config))
        scores = run.updates.scores(batch, trained)
        metrics |= health_metrics(collected.sampled, batch, scores, truncates_sampling(self.config)) | collected.metrics
        with timed("store"):  # last: the writer's thread would slow down whatever the driver computes after it
            values = token_values(collected, trained, scores) if stores_token_values(self.config) else None
            run.files.write(collected.sampled, "train", step, values)
        return collected, trained, metrics | memory_metrics([run.actor, run.critic])

    def _due(self, step: int) -> tuple[bool, bool]:
        """Whether the policy is validated after this step, and the anchor."""
        evaluator = self.run.evaluator
        return evaluator.policy_is_due(step, last=step == self.run.total_steps), evaluator.anchor_is_due(step)

    def _validate(self, step: int) -> dict[str, float]:
        run, (policy, anchor) = self.run, self._due(step)
        if not (policy or anchor) or self.stop.requested:
            return {}
        with run.source.engines(self.timer):
            metrics = run.evaluator.validate(step, self.timer) if policy else {}
            if anchor:
                metrics |= run.evaluator.validate_anchor(step, run.actor, run.source, self.timer)
        return metrics

    def _watch(self, metrics: dict[str, float], step: int) -> bool:
        """Whether the collapse guard put earlier weights back; its own metrics join the step's. Where it ends the run,
        the step is logged first.
        """
        metrics |= self.run.recovery.watch(metrics, step)
        try:
            rolled_back = self.run.recovery.act(step) is not None
        except TrainingCollapsed:
            self._log(metrics, step)
            raise
        if rolled_back:
            self.run.source.discard(step, self.timer)
        return rolled_back

    def _progress(self) -> dict[str, Any]:
        """The driver's part of a saved state, besides what the roles hold."""
        return self.run.source.state().to_json() | {
            "sources": self.run.sources,
            "kl_weight": self.run.estimator.kl_weight.value,
            "kl_coef": self.config.algorithm.kl_ctrl.kl_coef,
            "guard": self.run.recovery.guard.state_dict(),
            "evaluation_is_left": self._stopped_at_end,
        }

    def _log(self, metrics: dict[str, float], step: int) -> None:
        run = self.run
        run.tracker.log(metrics | self.timer.metrics(), step)  # phases may have continued since the step's metrics
        run.performance.write_timeline(step, self.timer)
        self.timer = Timer(self.run.tracker.now_in)

    def _finish(self) -> Path:
        self.run.writer.drain()
        self.run.tracker.finish()
        return write_report(self.run.run_dir)
