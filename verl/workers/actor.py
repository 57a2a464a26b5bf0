"""The actor role: the policy and its anchor on one shard of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray
import torch

from verl.config import Config
from verl.engine.batching import RankValues
from verl.engine.device.memory import in_phase
from verl.engine.device.runtime import resolve_precision
from verl.engine.device.sharding import num_parameters, reshard
from verl.engine.hf_model import weights_of
from verl.engine.policy_engine import PolicyEngine, Which
from verl.engine.varlen import attention_in_words
from verl.phases import Phase
from verl.pretrained import load_policy_tokenizer
from verl.single_controller.shared_batch import SharedBatch, SharedValues
from verl.weight_sync.buckets import ExportedWeights
from verl.weight_sync.export import WeightExporter, adapters_of
from verl.weight_sync.group import Rendezvous, WeightSource
from verl.workers.base import RankWorker

TOP_INDEX = "top_index"


class ActorWorker(RankWorker):
    """One rank of the actor."""

    engine: PolicyEngine
    role = "actor"

    def __init__(self, config: Config, total_training_steps: int, with_anchor: bool, rank: int, world_size: int):
        super().__init__(config, rank, world_size)
        self.total_training_steps = total_training_steps
        self.with_anchor = with_anchor
        self.own: RankValues | None = None  # values of its rows that this rank keeps until the update

    def start(self, init_method: str) -> None:
        """Meet the other ranks and load the models."""
        device = self.join(init_method)
        with self.memory.explaining("while the models are loaded"):
            self.engine = PolicyEngine(self.config, device, self.total_training_steps, self.with_anchor)
        self.tokenizer = load_policy_tokenizer(self.config)

    @in_phase(Phase.SCORE)
    def log_probs(self, batch: SharedBatch, of: Which, top_k: int) -> SharedValues:
        """Log-probs and entropies of this rank's rows, of the "policy" or the "anchor".

        The `top_k` most likely tokens stay here for the update, since they are by far the largest part of a batch.
        """
        scores = self.engine.log_probs(batch.fetch(), self.config.actor_rollout_ref.rollout.temperature, of, top_k)
        sent = {name: value_T for name, value_T in scores.tokens.items() if name != TOP_INDEX}
        if top_k:
            self.own = RankValues(scores.rows, {TOP_INDEX: scores.tokens[TOP_INDEX]})
        return SharedValues.of(RankValues(scores.rows, sent))

    @in_phase(Phase.UPDATE)
    def update(self, batch: SharedBatch) -> dict[str, float]:
        """Train the policy for one RL step; every rank returns the same metrics."""
        own, self.own = self.own, None
        return self.engine.update(batch.fetch(), own)

    @in_phase(Phase.UPDATE)
    def update_and_score(self, batch: SharedBatch, names: Sequence[str]) -> tuple[dict[str, float], SharedValues]:
        """What `update` does; also returns values of its first pass over each token, as
        `PolicyEngine.update_and_score` does.
        """
        own, self.own = self.own, None
        metrics, scores = self.engine.update_and_score(batch.fetch(), own, names)
        return metrics, SharedValues.of(scores)

    def attention(self) -> str:
        """The attention of the policy's passes, in words."""
        formats = self.config.actor_rollout_ref.actor.fsdp_config.mixed_precision
        model, device = self.engine.policy.model, self.engine.device
        precision = resolve_precision(device, formats.param_dtype, formats.reduce_dtype, num_parameters(model))
        return attention_in_words(model, device, precision.param_dtype)

    def follow_anchor(self, tau: float) -> None:
        with self.spans("follow_anchor"):
            self.engine.follow_anchor(tau)

    @in_phase(Phase.SYNC)
    def export_weights(self, version: int, of: Which, index: int, folder: str) -> ExportedWeights:
        """Write this rank's part of bucket `index` where engines read it; kept until the next one or the one after.

        `folder`: the driver's, in shared memory.
        """
        if not hasattr(self, "exporter"):
            self.exporter = WeightExporter(self.config, self.engine.device, Path(folder))
        model = self.engine.model_of(of)
        reshard(model)
        if adapters := adapters_of(model):
            return self.exporter.export(adapters.items(), version, index, torch.float32)
        return self.exporter.export(weights_of(model.model), version, index)

    def open_weight_group(self, size: int) -> Rendezvous:
        """Open a rendezvous for `size` members: this rank, which sends, and those that receive."""
        if not hasattr(self, "source"):
            self.source = WeightSource(self.engine.device)
        return self.source.open(ray.util.get_node_ip_address(), size)

    def join_weight_group(self) -> None:
        self.source.join()

    def send_weights(self, exports: dict[str, bytes]) -> None:
        """Start to send the bucket that `export_weights` has written on this host."""
        self.source.send(exports)

    def leave_weight_group(self) -> None:
        if hasattr(self, "source"):
            self.source.leave()

    def release_weights(self) -> None:
        """Free the exported weights where memory is short, once the engines have read them."""
        self.memory.note(Phase.SYNC)
        if hasattr(self, "exporter"):
            self.exporter.release()

    def close(self) -> None:
        """Remove what would outlive this process."""
        if hasattr(self, "exporter"):
            self.exporter.close()
