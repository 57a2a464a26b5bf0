"""The driver's view of the trained roles: calls on batches, with the ranks' answers merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from verl.config import Config
from verl.config.rules.placement import critic_gpus, training_gpus
from verl.errors import VerlError
from verl.phases import Phase
from verl.process.determinism import CUDA_ENVIRONMENT
from verl.process.startup import phase, rank_threads
from verl.protocol import TrainBatch
from verl.rollout.weight_stream import ExportCall, WeightSender, WeightStream, stream_buckets
from verl.single_controller import ResourcePool, WorkerGroup
from verl.single_controller.shared_batch import merged, share
from verl.single_controller.waiting import Call, wait_beside
from verl.tracking.spans import Span
from verl.weight_sync.memory import weight_folder
from verl.workers.actor import ActorWorker
from verl.workers.base import RankWorker
from verl.workers.critic import CriticWorker

CLOSE_S = 2.0
SCORED = ("ids", "loss_mask")  # the columns that log-probs and values are computed from


class RoleGroup:
    """A trained role on all ranks of a pool."""

    name: str
    learns_from: ClassVar[tuple[str, ...]]  # the columns of a batch's tokens, and of its rows, that an update reads
    learns_from_rows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, worker_class: type[RankWorker], config: Config, pool: ResourcePool, *args: object) -> None:
        at_once = max(pool.workers_per_node, training_gpus(config))  # a critic with GPUs of its own works beside
        threads = config.actor_rollout_ref.actor.num_threads or rank_threads(at_once)
        # Waiting threads sleep: one that spins takes the core from the roles that share it.
        env_vars = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        if config.trainer.deterministic:
            env_vars |= CUDA_ENVIRONMENT
        timeout_s = config.trainer.step_timeout_s
        with phase(f"loading the {self.name} in {pool.world_size} process{'es' * (pool.world_size > 1)}"):
            self.group = WorkerGroup(worker_class, pool, config, *args, timeout_s=timeout_s, env_vars=env_vars)
            self.group.wait_for_start()
            self.group.call_all("start", self.group.call_first("rendezvous"))

    def begin_update(self, batch: TrainBatch) -> Call:
        """Start one RL step on all ranks. The workers reduce the metrics over ranks, so any rank's are the run's."""
        return self.group.begin_all("update", share(batch, self.learns_from, self.learns_from_rows))

    def update(self, batch: TrainBatch, beside: Sequence[Call] = ()) -> dict[str, float]:
        """Train for one RL step; returns its metrics. If a call of another role in `beside` fails, that is raised at
        once.
        """
        metrics: dict[str, float] = wait_beside(self.begin_update(batch), beside)[0]
        return metrics

    def note_memory(self, phase: Phase) -> None:
        """Count the memory in use on the role's devices now for a phase in which others work."""
        self.group.call_all("note_memory", phase)

    def memory_metrics(self) -> dict[str, float]:
        """The metrics `memory_gib/...` since the last call, maximum over ranks; see `verl.engine.device.memory`."""
        ranks = self.group.call_all("memory_metrics")
        return {name: max(rank.get(name, 0.0) for rank in ranks) for name in ranks[0]}

    def take_spans(self) -> dict[str, list[Span]]:
        """The spans of what each rank did since the last call, by its name."""
        return {f"{self.name} {rank}": spans for rank, spans in enumerate(self.group.call_all("take_spans"))}

    def device_name(self) -> str:
        """Name of the device, as its driver reports it; empty for a CPU."""
        return str(self.group.call_first("device_name"))

    def start_saving_state(self, folder: Path) -> None:
        """Copy what `load_state` needs; it is written to the folder in the background."""
        self.group.call_all("start_saving_state", str(folder))

    def state_is_saved(self) -> bool:
        return all(self.group.call_all("state_is_saved"))

    def begin_saved_state(self, timeout_s: float | None = None) -> Call:
        """Ask for the files that each rank wrote, once it has. The wait raises CheckpointError if that failed."""
        return self.group.begin_all("saved_state", timeout_s=timeout_s)

    def load_state(self, folder: Path) -> None:
        """Resume exactly where `start_saving_state` was called. Raises CheckpointError."""
        self.group.call_all("load_state", str(folder))

    def load(self, path: Path, of: str | None = None) -> None:
        """Replace the weights of a model (None: the trained one) by saved ones; its optimizer is reset."""
        self.group.call_all("load", str(path), of)

    def save(self, path: Path, of: str | None = None) -> None:
        """Write a model (None: the trained one) in Hugging Face format to `path`."""
        self.group.call_all("save", str(path), of)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rate of all further steps."""
        self.group.call_all("scale_lr", factor)

    def shutdown(self) -> None:
        self.group.shutdown()


class ActorGroup(RoleGroup):
    """The actor and its anchor on all ranks."""

    name = "actor"
    learns_from = (*SCORED, "turn", "rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages", "correction")
    learns_from_rows = ("adv_batch_std",)

    def __init__(self, config: Config, pool: ResourcePool, total_training_steps: int, with_anchor: bool) -> None:
        super().__init__(ActorWorker, config, pool, total_training_steps, with_anchor)
        self._weights = weight_folder()
        self._sender = WeightSender(self.group.workers[0], self.group.timeout_s)

    def attention(self) -> str:
        """The attention of the policy's passes, in words."""
        return str(self.group.call_first("attention"))

    def log_probs(self, batch: TrainBatch, of: str = "policy", top_k: int = 0) -> dict[str, torch.Tensor]:
        """`log_prob` and `entropy` [T] float32; 0 outside the loss mask. The `top_k` most likely tokens stay on the
        ranks, for the update.
        """
        return merged(batch, self.group.call_all("log_probs", share(batch, SCORED), of, top_k))

    def update_and_score(
        self, batch: TrainBatch, beside: Sequence[Call], names: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """What `update` does and returns, and what its first forward pass over each token found, [T] float32, 0 outside
        the loss mask.

        `names`: `log_prob` and `entropy` of the policy before an update by one optimizer step; `kl` in the loss.
        """
        shared = share(batch, self.learns_from, self.learns_from_rows)
        answers = wait_beside(self.group.begin_all("update_and_score", shared, names), beside)
        return answers[0][0], merged(batch, [found for _, found in answers])

    def follow_anchor(self, tau: float) -> None:
        self.group.call_all("follow_anchor", tau)

    def publish_weights(self, version: int, of: str = "policy") -> WeightStream:
        """Offer the weights to the engines, bucket by bucket."""

        def export(index: int) -> ExportCall:
            return self.group.begin_all("export_weights", version, of, index, str(self._weights.path))

        buckets = stream_buckets(export, self._sender.send)
        return WeightStream(buckets, partial(self.group.call_all, "release_weights"), self._sender)

    def shutdown(self) -> None:
        with suppress(VerlError):  # a rank that is dead or stuck
            self.group.call_all("close", timeout_s=CLOSE_S)
        super().shutdown()
        self._weights.remove()


class CriticGroup(RoleGroup):
    """The critic on all ranks. `apart`: on GPUs of its own, so that it works beside the actor."""

    name = "critic"
    learns_from = (*SCORED, "values", "returns")

    def __init__(self, config: Config, pool: ResourcePool, total_training_steps: int) -> None:
        super().__init__(CriticWorker, config, pool, total_training_steps)
        self.apart = critic_gpus(config) > 0

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """[T] float32: at each of the loss mask's tokens, the value of the state before it; 0 elsewhere."""
        return self._values(batch, self.group.begin_all("values", share(batch, SCORED)))

    def begin_values(self, batch: TrainBatch) -> Callable[[], torch.Tensor]:
        """A function that waits for `values` and returns them. Only a critic on its own GPUs starts at once."""
        if not self.apart:
            return partial(self.values, batch)
        return partial(self._values, batch, self.group.begin_all("values", share(batch, SCORED)))

    def _values(self, batch: TrainBatch, begun: Call) -> torch.Tensor:
        return merged(batch, begun())["value"]


def spans_of(roles: Sequence[RoleGroup | None]) -> dict[str, list[Span]]:
    """The spans of what all ranks of the existing roles did since the last call, by rank name."""
    return {name: spans for role in filter(None, roles) for name, spans in role.take_spans().items()}


def memory_metrics(roles: Sequence[RoleGroup | None]) -> dict[str, float]:
    """The memory metrics of a run: the maximum over all existing roles."""
    most: dict[str, float] = {}
    for role in filter(None, roles):
        for name, gib in role.memory_metrics().items():
            most[name] = max(most.get(name, 0.0), gib)
    return most
