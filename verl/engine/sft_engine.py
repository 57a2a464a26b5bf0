"""Supervised training of a causal language model: the mean negative log-likelihood of the loss mask's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config.sections.schema import SftConfig
from verl.engine.batching import ModelInput, selected_tokens
from verl.engine.device.runtime import set_threads
from verl.engine.device.sharding import reshard
from verl.engine.files.loading import load_sharded
from verl.engine.files.resumable import Resumable
from verl.engine.files.saving import save_as_a_test, save_model
from verl.engine.learner import Learner, Schedule, TokenLoss, build_adamw, set_lr
from verl.engine.micro_batches import Budget, plan
from verl.engine.model import layout_of
from verl.engine.token_values import read_tokens
from verl.errors import ConfigError
from verl.process.startup import RETURN_EVERY_S, keep_freed_memory, return_free_memory
from verl.process.storage import Digests
from verl.protocol import TrainBatch


class SftEngine:
    """One model sharded over all ranks of the process group; every rank gets the same whole batch in every step."""

    def __init__(self, config: SftConfig, device: torch.device) -> None:
        """Load and shard `model.path`. The process group must exist. Raises ConfigError."""
        trainer, fsdp = config.trainer, config.fsdp_config
        if fsdp.param_offload or fsdp.grad_offload or fsdp.optimizer_offload:
            raise ConfigError(
                "fsdp_config.*_offload frees a device between the phases of RL, but supervised training has only one: "
                "set it to False; to save memory, lower trainer.max_token_len_per_gpu or use more devices"
            )
        # Settings of the process come before the model takes memory.
        set_threads(trainer.num_threads)
        keep_freed_memory()

        self.num_steps_done = 0
        self.model = load_sharded(
            config.model.path,
            config.model,
            fsdp,
            fsdp.mixed_precision,
            device,
            trainer.head_chunk_tokens,
            trained=True,
            seed=trainer.seed,
        )

        # The optimizer comes after sharding, since it holds this rank's shards.
        self.schedule = Schedule.from_config(config.optim, trainer.total_training_steps)
        optimizer = build_adamw(self.model.parameters(), config.optim)
        layout = layout_of([self.model.model], config.model.use_remove_padding)
        failure_dir = Path(trainer.default_local_dir) / "failures"
        budget = Budget(tokens=trainer.max_token_len_per_gpu)
        how = layout, fsdp.reduce_gradients
        self.learner = Learner(self.model, optimizer, device, budget, trainer.grad_clip, failure_dir, *how)
        self.resumable = Resumable({"model": self.model}, "model", optimizer)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """One AdamW step on `batch`: `loss` in nats per token, `grad_norm`, `lr`. Raises NumericalError."""
        lr = self.schedule.at(self.num_steps_done)
        set_lr(self.learner.optimizer, lr)
        means = self.learner.learn(batch, self._loss, self.num_steps_done + 1)
        reshard(self.model)
        self.num_steps_done += 1
        return_free_memory(RETURN_EVERY_S)
        return means | {"lr": lr}

    def mean_loss(self, batches: Sequence[TrainBatch]) -> float:
        """The loss over the tokens of all batches, in nats per token, without training. Every rank gets the same."""
        learner, place = self.learner, (dist.get_world_size(), dist.get_rank())
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=learner.device)
        for batch in batches:
            micro_batches = plan(
                batch.lengths_B, *place, learner.budget, learner.layout, learner.layout.prefixes(batch)
            )
            found = read_tokens(batch, micro_batches, learner.device, learner.layout, self._log_probs)
            total -= sum(value_T.sum(dtype=torch.float64) for value_T in found.values())
        reshard(self.model)
        # Each rank has read its own rows only; the number of tokens is that of all.
        dist.all_reduce(total)
        return float(total) / sum(len(selected_tokens(batch)) for batch in batches)

    def save_state(self, folder: Path) -> Digests:
        """Write all that `load_state` needs to the folder, which must exist. Returns what this rank wrote.

        Raises CheckpointError.
        """
        self.resumable.start_saving(folder, {"step": self.num_steps_done})
        return self.resumable.saved()

    def load_state(self, folder: Path) -> None:
        """Resume exactly where `save_state` was called. Raises CheckpointError."""
        self.num_steps_done = int(self.resumable.load(folder, {"step": 0})["step"])

    def save_pretrained(self, path: str | Path, tokenizer: Any) -> None:
        """Save in Hugging Face format. Raises CheckpointError on every rank if it fails."""
        save_model(self.model, Path(path), tokenizer)

    def save_as_a_test(self, tokenizer: Any, named: str) -> None:
        """See `verl.engine.files.saving.save_as_a_test`; before the first step."""
        save_as_a_test(self.model.model, tokenizer, named)

    @property
    def num_embeddings(self) -> int:
        """The number of token ids that the model knows, from 0 on."""
        return int(self.model.model.get_input_embeddings().weight.shape[0])

    def _log_probs(self, inputs: ModelInput) -> dict[str, torch.Tensor]:
        return {"log_prob": self.model(inputs, 1.0, entropy_gradient=False).log_prob_N.float()}

    def _loss(self, batch: TrainBatch, inputs: ModelInput) -> TokenLoss:
        return TokenLoss(-self.model(inputs, 1.0, entropy_gradient=False).log_prob_N, {})
