"""The driver's view of the actor role: calls on batches, with the ranks' answers merged."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import torch

from verl.config import Config
from verl.engine.batching import merge_rows
from verl.protocol import TrainBatch
from verl.rollout.weight_file import WeightHandle
from verl.single_controller import ResourcePool, WorkerGroup
from verl.workers.actor import ActorWorker


class ActorGroup:
    """The actor and its anchor on all ranks."""

    def __init__(self, config: Config, pool: ResourcePool, total_training_steps: int, with_anchor: bool) -> None:
        threads = config.actor_rollout_ref.actor.num_threads or max(1, (os.cpu_count() or 1) // pool.workers_per_node)
        # Waiting threads sleep: one that spins takes the core from the roles that share it.
        env_vars = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self.group = WorkerGroup(
            ActorWorker,
            pool,
            config,
            total_training_steps,
            with_anchor,
            timeout_s=config.trainer.step_timeout_s,
            env_vars=env_vars,
        )
        self.weight_dir = Path(tempfile.mkdtemp(prefix="verl-weights-", dir=_shared_memory()))
        self.group.call_all("start", self.group.call_first("rendezvous"))

    def log_probs(self, batch: TrainBatch, of: str = "policy") -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [T], entropies [T]) float32; 0 where the loss mask is False."""
        answers = self.group.call_all("log_probs", batch, of)
        log_prob_T = merge_rows(batch.lengths_B, [(answer.rows, answer.log_prob_T) for answer in answers])
        entropy_T = merge_rows(batch.lengths_B, [(answer.rows, answer.entropy_T) for answer in answers])
        return log_prob_T, entropy_T

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One RL step on all ranks. The metrics are reduced over ranks by the workers, so any rank's are the run's."""
        return self.group.call_all("update", batch)[0]

    def follow_anchor(self, tau: float) -> None:
        self.group.call_all("follow_anchor", tau)

    def publish_weights(self, version: int, of: str = "policy") -> WeightHandle:
        return self.group.call_all("publish_weights", version, str(self.weight_dir), of)[0]

    def save(self, path: Path, of: str = "policy") -> None:
        self.group.call_all("save", str(path), of)

    def shutdown(self) -> None:
        self.group.shutdown()
        shutil.rmtree(self.weight_dir, ignore_errors=True)


def _shared_memory() -> str | None:
    """A folder in memory for weights on their way to the engines, or None for the default temporary folder."""
    with contextlib.suppress(OSError):
        if os.access("/dev/shm", os.W_OK):
            return "/dev/shm"
    return None
