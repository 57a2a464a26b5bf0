"""The RL loop: collect, estimate, update, sync, validate, save."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from verl.config import Config
from verl.config.asynchronous import max_staleness
from verl.config.predicates import has_anchor, stores_token_values
from verl.data.prompts import PromptSource
from verl.determinism import seed_everything
from verl.engine.batching import split_rows
from verl.errors import StorageError, TrainingCollapsed
from verl.pretrained import load_policy_tokenizer
from verl.protocol import TrainBatch, Trajectory
from verl.rollout.manager import RolloutManager
from verl.stacks import offer_stacks
from verl.startup import phase, tell
from verl.tracking.background_writer import BackgroundWriter
from verl.tracking.report import write_report
from verl.tracking.samples import samples_to_show
from verl.tracking.timing import Timer
from verl.tracking.token_columns import TokenValues
from verl.tracking.tracker import Tracker
from verl.tracking.trajectory_store import Kind, write_trajectories
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.collection import Collected, Collector
from verl.trainer.estimates import Estimator, for_losses
from verl.trainer.failing import last_words, tell_stall
from verl.trainer.health import health_metrics
from verl.trainer.layout import reserve_pools
from verl.trainer.metrics import step_metrics, validation_metrics
from verl.trainer.performance import Performance
from verl.trainer.prompt_sets import load_prompts
from verl.trainer.recovery import Recovery
from verl.trainer.resuming import prepare_folder, settings_since, state_to_resume
from verl.trainer.roles import ActorGroup, CriticGroup, actor_config, memory_metrics
from verl.trainer.rollouts_ahead import rollout_source
from verl.trainer.sampling_state import SamplingState
from verl.trainer.scoring import Scorer
from verl.trainer.staleness import staleness_metrics
from verl.trainer.stored_values import token_values
from verl.trainer.updates import Updates, anchor_moves
from verl.trainer.watchdog import Watchdog

log = logging.getLogger(__name__)

SCORE = "val/test_score/mean"
SPLITS: dict[Kind, str] = {"val": "validating", "val_ref": "validating the anchor", "test": "testing"}
WATCHDOG_GRACE_S = 30.0  # a wait's own deadline comes first


class RLTrainer:
    """One run: its prompts, its roles, and the loop over them. `device` is "cpu" or "cuda"."""

    def __init__(self, config: Config, device: str) -> None:
        seed_everything(config.trainer.seed)  # for rewards and environments that draw from the shared generators
        self.config = config
        self.run_dir = Path(config.trainer.default_local_dir)
        self.tokenizer = load_policy_tokenizer(config)
        with phase("loading the prompts"):
            self.train_prompts, self.val_prompts, self.test_prompts = load_prompts(config, self.tokenizer)
        self.total_steps = config.trainer.total_training_steps or self._steps_of_all_epochs()
        tell(f"prompts: {len(self.train_prompts)} for training, {len(self.val_prompts)} for validation")
        self.scorer = Scorer(config, self.tokenizer)
        self.estimator = Estimator(config)
        self.timer = Timer()
        self._undo: list[Callable[[], None]] = []  # how to stop what was started, oldest first
        self._start(device)

    def fit(self) -> Path:
        """Train to the last step. Returns the path of the report, which is also written for a run that collapsed."""
        try:
            with last_words(self.run_dir, self.checkpoints, self.writer):
                self._run()
        except TrainingCollapsed:
            try:
                self._finish()
            except StorageError as error:
                log.warning("there is no report: %s", error)
            raise
        return self._finish()

    def _finish(self) -> Path:
        self.writer.drain()
        self.tracker.finish()
        return write_report(self.run_dir)

    def _run(self) -> None:
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and not self.steps_done):
            self._log(self._validate(self.steps_done) | self._test(self.steps_done), self.steps_done)
        for step in range(self.steps_done + 1, 1 if trainer.val_only else self.total_steps + 1):
            last = step == self.total_steps
            with self.timer("step"), self._told_if_first(step):
                collected, trained, metrics = self._train_step(step)
            metrics |= self.performance.metrics(self.timer, collected.sampled, trained)
            metrics |= self._validations(step)
            # Before anything is saved: a checkpoint has the weights that the run goes on with, and their score.
            went_back = self._watch(metrics, step)
            score = None if went_back else metrics.get(SCORE)
            save = last or went_back or _due(trainer.save_freq, step)
            if save:
                with self.timer("save_checkpoint"):
                    self.writer.drain()  # a run that resumes after this step does not write its files again
                    self.checkpoints.save(step)
            if last:
                metrics |= self._test(step)
            self.tracker.log_samples(samples_to_show(trainer, collected.sampled, step, self._show), step)
            self._log(metrics, step)
            if save:
                self.writer.drain()  # the files of the test, of the last step
                self.checkpoints.save_state(step, self._progress(), score)
            self.checkpoints.settle(wait=last)

    def _watch(self, metrics: dict[str, float], step: int) -> bool:
        """Whether the collapse guard put earlier weights back; its own metrics join the step's. Where it ends the run,
        the step is logged first.
        """
        metrics |= self.recovery.watch(metrics, step)
        try:
            went_back = self.recovery.answer(step) is not None
        except TrainingCollapsed:
            self._log(metrics, step)
            raise
        if went_back:
            self.source.discard(step, self.timer)
        return went_back

    def _told_if_first(self, step: int) -> AbstractContextManager[None]:
        return phase(f"step {step} of {self.total_steps}") if step == self.steps_done + 1 else nullcontext()

    def _progress(self) -> dict[str, Any]:
        """What the driver needs to go on, besides what the roles hold."""
        return self.source.state().to_json() | {
            "kl_weight": self.estimator.kl_weight.value,
            "guard": self.recovery.guard.state_dict(),
        }

    def _resume(self) -> int:
        """Go on with an earlier run, if that is asked for. Returns the number of steps that it has done."""
        path = state_to_resume(self.config.trainer)
        if path is None:
            return 0
        progress = self.checkpoints.resume(path)
        SamplingState.from_json(progress).put_back(self.train_prompts)
        self.estimator.kl_weight.value = progress["kl_weight"]
        self.recovery.guard.load_state_dict(progress["guard"])
        log.info("going on after step %d, from %s", progress["step"], path)
        return int(progress["step"])

    def _train_step(self, step: int) -> tuple[Collected, TrainBatch, dict[str, float]]:
        """What was sampled, what of it was trained on, and metrics."""
        config, timed = self.config, self.timer
        collected = self.source.take(step, timed)
        batch = collected.batch
        metrics = self.estimator.prepare(batch, self.actor, self.critic, timed)
        trained = for_losses(batch, self.updates.kept(collected.trained))
        metrics |= self.updates.run(trained, step, timed, partial(self._sync, step))
        num_shares = self.pool.world_size // config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
        metrics |= step_metrics(
            collected.sampled,
            trained,
            seconds=timed.seconds,
            partitions=split_rows(trained.lengths_B, num_shares),
            max_prompt_length=config.data.max_start_length,
        )
        metrics |= staleness_metrics(collected.sampled, step, max_staleness(config))
        scored = self.updates.scored(batch, trained)
        metrics |= health_metrics(collected.sampled, scored) | collected.metrics
        with timed("store"):  # last: the writer's thread would slow down whatever the driver computes after it
            values = token_values(collected, trained, scored) if stores_token_values(config) else None
            self._store(collected.sampled, "train", step, values)
        return collected, trained, metrics | memory_metrics([self.actor, self.critic])

    def _sync(self, step: int) -> None:
        self.source.renew(step, self.timer, hold=any(self._due_validations(step)))

    def _due_validations(self, step: int) -> tuple[bool, bool]:
        """Whether the policy is validated after this step, and the anchor."""
        trainer = self.config.trainer
        policy = step == self.total_steps or _due(trainer.test_freq, step)
        return policy, has_anchor(self.config) and _due(trainer.eval_ref_policy_freq, step)

    def _validations(self, step: int) -> dict[str, float]:
        policy, anchor = self._due_validations(step)
        if not (policy or anchor):
            return {}
        with self.source.engines(self.timer):
            metrics = self._validate(step) if policy else {}
            return metrics | (self._validate_anchor(step) if anchor else {})

    def _validate(self, step: int) -> dict[str, float]:
        with self.timer("testing"):
            return self._evaluate(self.val_prompts, "val", step)

    def _test(self, step: int) -> dict[str, float]:
        """The held-out test files, before the first step and after the last one."""
        if self.test_prompts is None:
            return {}
        with self.timer("testing"):
            return self._evaluate(self.test_prompts, "test", step)

    def _validate_anchor(self, step: int) -> dict[str, float]:
        with self.timer("testing_ref_policy"):
            self.rollouts.load_weights(partial(self.actor.publish_weights, step, of="anchor"))
            metrics = self._evaluate(self.val_prompts, "val_ref", step)
            self.source.load(step)
        return metrics

    def _evaluate(self, prompts: PromptSource, split: Kind, step: int) -> dict[str, float]:
        rows = prompts.all()
        with phase(f"{SPLITS[split]} on {len(rows)} prompts"):
            trajectories = self.rollouts.collect(rows, 1, step, how="val")
            self.scorer.score(trajectories, validate=True)
        metrics = validation_metrics(trajectories, split)
        self._store(trajectories, split, step)
        return metrics

    def _start(self, device: str) -> None:
        config, trainer = self.config, self.config.trainer
        try:
            prepare_folder(trainer)
            for change in settings_since(config):
                log.log(logging.INFO if change.harmless else logging.WARNING, "other than before: %s", change)
            offer_stacks()
            watchdog = Watchdog(trainer.step_timeout_s + WATCHDOG_GRACE_S, partial(tell_stall, self.run_dir))
            self._undo.append(watchdog.stop)
            names = (trainer.project_name, trainer.experiment_name)
            self.tracker = Tracker(trainer.logger, *names, self.run_dir, asdict(config), self.total_steps)
            self._undo.append(partial(self.tracker.finish, failed=True))  # unless the run has finished it
            self.writer = BackgroundWriter()
            self._undo.append(self.writer.close)
            # A tokenizer is not for two threads at once: the writer's, and the loop's beside sampling.
            self._decode, self._show = (copy.deepcopy(self.tokenizer).decode for _ in range(2))
            pools = reserve_pools(config, device)
            self._undo.append(pools.release)
            for line in pools.table.splitlines():
                tell(line)
            self.pool = pool = pools.training
            self.rollouts = RolloutManager(config, pools.sampling, pools.sampling_nodes)
            self._undo.append(self.rollouts.shutdown)
            self.actor = ActorGroup(actor_config(config), pool, self.total_steps, has_anchor(config))
            self._undo.append(self.actor.shutdown)
            self.critic: CriticGroup | None = None
            if config.algorithm.adv_estimator == "gae" and not trainer.val_only:
                self.critic = CriticGroup(config, pools.critic, self.total_steps)
                self._undo.append(self.critic.shutdown)
            self.performance = Performance(config, self.rollouts, self.actor, self.critic, self.run_dir)
            self.updates = Updates(config, self.actor, self.critic)
            collector = Collector(config, self.train_prompts, self.rollouts, self.scorer, self.total_steps)
            self.source = rollout_source(config, collector, self.rollouts, self.actor, self.total_steps)
            self._undo.append(self.source.close)
            self.checkpoints = Checkpoints(
                self.run_dir, self.actor, self.critic, anchor_moves(config), trainer.max_ckpt_to_keep
            )
            self.recovery = Recovery(trainer.collapse_guard, self.checkpoints)
            self.steps_done = self._resume()
            self.rollouts.check()
            self.source.load(self.steps_done)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop every process that this run started, whatever state it is in."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:  # whatever it is, the others have to be stopped too
                log.warning("while the run was ended: %s", error)

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.tracker.log(metrics | self.timer.metrics(), step)  # phases may have gone on since the step's metrics
        self.performance.write_timeline(step, self.timer)
        self.timer = Timer()

    def _store(self, trajectories: list[Trajectory], split: Kind, step: int, values: TokenValues | None = None) -> None:
        if self.config.trainer.save_trajectories:
            what = (split, step, trajectories, self._decode, values)
            self.writer.hand_over(partial(write_trajectories, self.run_dir, *what))

    def _steps_of_all_epochs(self) -> int:
        return max(1, len(self.train_prompts) // self.config.data.train_batch_size) * self.config.trainer.total_epochs


def _due(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
