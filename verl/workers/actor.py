"""The actor role: the policy and its anchor on one shard of the mesh."""

from __future__ import annotations

import socket
from pathlib import Path

from transformers import AutoTokenizer

from verl.config import Config
from verl.engine.device import init_process_group, resolve_device
from verl.engine.policy_engine import PolicyEngine, RankValues, Which
from verl.protocol import TrainBatch
from verl.rollout.weight_file import WeightHandle, publish_weights


class ActorWorker:
    """One rank of the actor. Every method is called on all ranks at once, since the sharded model needs all of them."""

    def __init__(self, config: Config, total_training_steps: int, with_anchor: bool, rank: int, world_size: int):
        self.config = config
        self.total_training_steps = total_training_steps
        self.with_anchor = with_anchor
        self.rank, self.world_size = rank, world_size

    def rendezvous(self) -> str:
        """Address of a free port on this worker's node, for `torch.distributed`."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host = "127.0.0.1" if self.config.trainer.nnodes == 1 else socket.gethostbyname(socket.gethostname())
        return f"tcp://{host}:{port}"

    def start(self, init_method: str) -> None:
        device = resolve_device(self.config.trainer.device)
        init_process_group(self.rank, self.world_size, init_method, device)
        self.engine = PolicyEngine(self.config, device, self.total_training_steps, self.with_anchor)
        self.tokenizer = AutoTokenizer.from_pretrained(
            self.config.data.tokenizer or self.config.actor_rollout_ref.model.path
        )

    def log_probs(self, batch: TrainBatch, of: Which) -> RankValues:
        """Log-probs and entropies of this rank's rows, of the "policy" or the "anchor"."""
        return self.engine.log_probs(batch, self.config.actor_rollout_ref.rollout.temperature, of)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        return self.engine.update(batch)

    def follow_anchor(self, tau: float) -> None:
        self.engine.follow_anchor(tau)

    def publish_weights(self, version: int, directory: str, of: Which) -> WeightHandle | None:
        """Gather the full weights; rank 0 writes them for the rollout engines and returns the handle."""
        weights = self.engine.iter_full_parameters(of)
        if self.rank == 0:
            return publish_weights(weights, version, directory)
        for _ in weights:  # every rank takes part in each gather
            pass
        return None

    def save(self, path: str, of: Which) -> None:
        """Write the model and tokenizer in Hugging Face format to `path`."""
        self.engine.save_pretrained(Path(path), self.tokenizer, of=of)
