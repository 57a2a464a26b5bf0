"""The RL loop: collect, score, estimate, update, sync, validate, save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer

from verl.by_name import load_by_name
from verl.config import Config
from verl.data.prompts import PromptSource
from verl.errors import RolloutError
from verl.protocol import Status, TrainBatch, Trajectory
from verl.rollout.manager import RolloutManager
from verl.single_controller import ResourcePool
from verl.tracking.jsonl_backend import set_aside
from verl.tracking.report import write_report
from verl.tracking.timing import Timer
from verl.tracking.tracker import Tracker
from verl.tracking.trajectory_store import Kind, write_trajectories
from verl.trainer.advantages import estimate_advantages
from verl.trainer.metrics import step_metrics, validation_metrics
from verl.trainer.roles import ActorGroup


class RLTrainer:
    """One run: its prompts, its roles, and the loop over them. `device` is "cpu" or "cuda"."""

    def __init__(self, config: Config, device: str) -> None:
        self.config = config
        self.run_dir = Path(config.trainer.default_local_dir)
        self.tokenizer = AutoTokenizer.from_pretrained(config.data.tokenizer or config.actor_rollout_ref.model.path)
        self.train_prompts = self._prompt_source(config.data.train_files, config.data.train_data_num)
        self.val_prompts = self._prompt_source(config.data.val_files, config.data.val_data_num)
        self.test_prompts = self._prompt_source(config.data.test_files, None) if config.data.test_files else None
        self.total_steps = config.trainer.total_training_steps or self._steps_of_all_epochs()
        self.reward = load_by_name(config.reward.function, "reward.function")(**config.reward.kwargs)
        self.timer = Timer()
        self._undo: list[Callable[[], None]] = []  # how to stop what was started, oldest first
        self._start(device)

    def fit(self) -> Path:
        """Train to the last step. Returns the path of the report."""
        trainer = self.config.trainer
        if trainer.val_before_train or trainer.val_only:
            self._log(self._validate(0) | self._test(0), 0)
        for step in range(1, 1 if trainer.val_only else self.total_steps + 1):
            last = step == self.total_steps
            with self.timer("step"):
                metrics = self._train_step(step)
            if last or _due(trainer.test_freq, step):
                metrics |= self._validate(step)
            if _due(trainer.eval_ref_policy_freq, step):
                metrics |= self._validate_anchor(step)
            if last or _due(trainer.save_freq, step):
                self._save(step)
            if last:
                metrics |= self._test(step)
            self._log(metrics, step)
        self.tracker.finish()
        return write_report(self.run_dir)

    def _train_step(self, step: int) -> dict[str, float]:
        config, timed = self.config, self.timer
        with timed("gen"):
            prompts = self.train_prompts.next(config.data.train_batch_size)
            trajectories = self.rollouts.collect(prompts, config.actor_rollout_ref.rollout.n_agent, step)
            rollout_metrics = self.rollouts.stats
            self.rollouts.sleep()
        batch = self._score(trajectories)
        with timed("old_log_prob"):
            batch.tokens["old_log_probs"] = self._old_log_probs(batch)
        if self._needs_anchor_log_probs:
            with timed("ref"):
                batch.tokens["ref_log_probs"], _ = self.actor.log_probs(batch, of="anchor")
        with timed("adv"):
            metrics = estimate_advantages(batch, config.algorithm)
        with timed("update_actor"):
            metrics |= self.actor.update(batch)
        metrics |= self._follow_anchor(step)
        with timed("weight_sync"):
            self.rollouts.wake()
            self.rollouts.load_weights(self.actor.publish_weights(step))
        self._store(trajectories, "train", step)
        longest = config.data.max_start_length
        metrics |= step_metrics(trajectories, batch, seconds=timed.seconds, max_prompt_length=longest)
        return metrics | rollout_metrics

    def _score(self, trajectories: list[Trajectory]) -> TrainBatch:
        """Reward every trajectory that did not fail; the failed ones stay out of the batch."""
        usable = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        if not usable:
            raise RolloutError(f"all {len(trajectories)} trajectories of the step failed: {trajectories[0].failure}")
        for trajectory in usable:
            trajectory.reward, trajectory.reward_components = self.reward.score(trajectory, self.tokenizer)
        return TrainBatch.from_trajectories(usable)

    def _old_log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """[T] float32: what the policy said when it sampled: recomputed, or as the sampler reported it."""
        if self.config.actor_rollout_ref.actor.use_rollout_log_probs:
            return batch.tokens["rollout_log_probs"]
        return self.actor.log_probs(batch)[0]

    def _follow_anchor(self, step: int) -> dict[str, float]:
        tau, period = self.config.algorithm.ref_policy_ema_tau, self.config.algorithm.ref_policy_ema_update_period
        if not self._has_anchor or tau >= 1.0 or step % period:
            return {}
        with self.timer("update_ref_policy_ema"):
            self.actor.follow_anchor(tau)
        return {"ref_policy/ema_tau": tau}

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
        if not self._has_anchor:
            return {}
        with self.timer("testing_ref_policy"):
            self.rollouts.load_weights(self.actor.publish_weights(step, of="anchor"))
            metrics = self._evaluate(self.val_prompts, "val_ref", step)
            self.rollouts.load_weights(self.actor.publish_weights(step))
        return metrics

    def _evaluate(self, prompts: PromptSource, split: Kind, step: int) -> dict[str, float]:
        rows, size = prompts.all(), self.config.data.val_batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        trajectories = [t for part in parts for t in self.rollouts.collect(part, 1, step, validate=True)]
        self._score(trajectories)
        self._store(trajectories, split, step)
        return validation_metrics(trajectories, split)

    def _save(self, step: int) -> None:
        with self.timer("save_checkpoint"):
            self.actor.save(self.run_dir / "actor" / f"global_step_{step}")
            if self._has_anchor and self.config.algorithm.ref_policy_ema_tau < 1.0:
                self.actor.save(self.run_dir / "ref" / f"global_step_{step}", of="anchor")

    def _start(self, device: str) -> None:
        config, trainer = self.config, self.config.trainer
        try:
            set_aside(self.run_dir)
            names = (trainer.project_name, trainer.experiment_name)
            self.tracker = Tracker(trainer.logger, *names, self.run_dir, asdict(config), self.total_steps)
            self._undo.append(self.tracker.finish)
            pool = ResourcePool(trainer.nnodes, trainer.n_gpus_per_node, device)
            self._undo.append(pool.release)
            pool.reserve(trainer.step_timeout_s)
            self.rollouts = RolloutManager(config, pool)
            self._undo.append(self.rollouts.shutdown)
            self.actor = ActorGroup(config, pool, self.total_steps, self._has_anchor)
            self._undo.append(self.actor.shutdown)
            self.rollouts.load_weights(self.actor.publish_weights(0))
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop every process that this run started, whatever state it is in."""
        while self._undo:
            self._undo.pop()()

    def _log(self, metrics: dict[str, float], step: int) -> None:
        self.tracker.log(self.timer.metrics() | metrics, step)
        self.timer = Timer()

    def _store(self, trajectories: list[Trajectory], split: Kind, step: int) -> None:
        if self.config.trainer.save_trajectories:
            write_trajectories(self.run_dir, split, step, trajectories, self.tokenizer.decode)

    def _prompt_source(self, files: str | list[str], num_rows: int | None) -> PromptSource:
        data = self.config.data
        return PromptSource(
            files,
            self.tokenizer,
            prompt_key=data.prompt_key,
            max_start_length=data.max_start_length,
            shuffle=data.shuffle_train_dataloader,
            seed=self.config.trainer.seed,
            num_rows=num_rows,
            filter_overlong=data.filter_overlong_prompts,
        )

    def _steps_of_all_epochs(self) -> int:
        return max(1, len(self.train_prompts) // self.config.data.train_batch_size) * self.config.trainer.total_epochs

    @property
    def _has_anchor(self) -> bool:
        return self.config.actor_rollout_ref.actor.use_kl_loss or self.config.trainer.eval_ref_policy_freq > 0

    @property
    def _needs_anchor_log_probs(self) -> bool:
        """The exact KL reads the anchor's distributions during the update; sampled KL needs only its log-probs."""
        actor = self.config.actor_rollout_ref.actor
        return actor.use_kl_loss and actor.kl_loss_type != "full_reverse"


def _due(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
