"""The actor role: the policy and its anchor on one shard of the mesh."""

from __future__ import annotations

from pathlib import Path

import torch

from verl.config import Config
from verl.engine.batching import RankValues
from verl.engine.device import DTYPES
from verl.engine.memory_meter import in_phase
from verl.engine.policy_engine import PolicyEngine, Which
from verl.engine.sharding import named_tensors, reshard
from verl.phases import Phase
from verl.pretrained import load_policy_tokenizer
from verl.protocol import TrainBatch
from verl.rollout.weight_buckets import gathered, plan_buckets
from verl.rollout.weight_file import WeightHandle, publish_weights
from verl.rollout.weight_ipc import ExportedWeights, export_weights
from verl.workers.base import RankWorker


class ActorWorker(RankWorker):
    """One rank of the actor."""

    engine: PolicyEngine
    role = "actor"

    def __init__(self, config: Config, total_training_steps: int, with_anchor: bool, rank: int, world_size: int):
        super().__init__(config, rank, world_size)
        self.total_training_steps = total_training_steps
        self.with_anchor = with_anchor

    def start(self, init_method: str) -> None:
        """Meet the other ranks and load the models."""
        self.engine = PolicyEngine(self.config, self.join(init_method), self.total_training_steps, self.with_anchor)
        self.tokenizer = load_policy_tokenizer(self.config)

    @in_phase(Phase.SCORE)
    def log_probs(self, batch: TrainBatch, of: Which, top_k: int) -> RankValues:
        """Log-probs and entropies of this rank's rows, of the "policy" or the "anchor"."""
        return self.engine.log_probs(batch, self.config.actor_rollout_ref.rollout.temperature, of, top_k)

    def follow_anchor(self, tau: float) -> None:
        self.engine.follow_anchor(tau)

    @in_phase(Phase.SYNC)
    def publish_weights(self, version: int, directory: str, of: Which) -> WeightHandle | None:
        """Gather the full weights; rank 0 writes them for the rollout engines and returns the handle."""
        weights = self.engine.iter_full_parameters(of)
        if self.rank == 0:
            return publish_weights(weights, version, directory)
        for _ in weights:  # every rank takes part in each gather
            pass
        return None

    @in_phase(Phase.SYNC)
    def export_weights(self, version: int, of: Which, index: int) -> ExportedWeights:
        """Gather the weights of bucket `index` on this rank's device, in the engines' number format.

        They stay until the next bucket or `release_weights`. An engine that chooses its format itself ("auto") is given
        float32 and casts.
        """
        self.exported = {}
        model = self.engine.model_of(of)
        reshard(model)
        rollout = self.config.actor_rollout_ref.rollout
        dtype = DTYPES.get(rollout.dtype, torch.float32)
        named = dict(named_tensors(model))
        buckets = plan_buckets(named.items(), dtype, rollout.weight_sync.bucket_mib)
        self.exported = gathered([(name, named[name]) for name in buckets[index]], dtype)
        return export_weights(self.exported, version, self.engine.device, index, len(buckets))

    def release_weights(self) -> None:
        """Free the exported weights; the engines have read them."""
        self.memory.note(Phase.SYNC)
        self.exported = {}
        if self.engine.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def load(self, path: str, of: Which) -> None:
        """Replace the weights by a saved model's; the optimizer starts anew."""
        self.engine.load_saved(Path(path), of)

    def save(self, path: str, of: Which) -> None:
        """Write the model and tokenizer in Hugging Face format to `path`."""
        self.engine.save_pretrained(Path(path), self.tokenizer, of=of)
