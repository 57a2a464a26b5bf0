"""The critic: values of the policy's tokens, and their regression on returns. One object per rank, no Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.algorithms.value_loss import value_loss
from verl.config import Config
from verl.engine.batching import (
    ModelInput,
    RankValues,
    flat_positions,
    model_input,
    plan,
    trained_rows,
    values_at,
)
from verl.engine.device import set_threads
from verl.engine.learner import Learner, TokenLoss
from verl.engine.loading import load_sharded_critic
from verl.engine.mini_batches import mean_of, micro_budget, mini_batches
from verl.engine.model import layout_of
from verl.engine.optimizer import Schedule, build_adamw
from verl.engine.residence import residence
from verl.engine.restoring import load_saved
from verl.engine.resumable import Resumable
from verl.engine.saving import save_model
from verl.engine.sequence_parallel import sequence_group
from verl.engine.sharding import reshard
from verl.engine.trained import TrainedEngine
from verl.errors import NumericalError
from verl.phases import Phase
from verl.protocol import TrainBatch


class ValueEngine(TrainedEngine):
    """The value model, sharded over all ranks of the process group.

    Each rank gets the same whole batch in every call and works on its own rows. All methods are collective: every
    rank calls them in the same order. The batch's `loss_mask` says which tokens have a value.
    """

    def __init__(self, config: Config, device: torch.device, total_training_steps: int) -> None:
        """Load and shard `critic.model.path`. The process group must exist. Raises ConfigError.

        `total_training_steps` is the length of the learning-rate schedule unless optim.total_training_steps says
        otherwise.
        """
        self.critic = config.critic
        self.device = device
        self.seed = config.trainer.seed
        set_threads(config.actor_rollout_ref.actor.num_threads)
        self.model = load_sharded_critic(self.critic.model, device, self.seed)
        sequence = sequence_group(device, self.critic.ulysses_sequence_parallel_size)
        self.layout = layout_of([self.model.model], self.critic.model.use_remove_padding, sequence)
        optim = self.critic.optim
        optimizer = build_adamw(self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay)
        budget = micro_budget(
            self.critic.use_dynamic_bsz,
            self.critic.ppo_max_token_len_per_gpu,
            self.critic.ppo_micro_batch_size,
            self.layout.ranks_per_row,
        )
        failure_dir = Path(config.trainer.default_local_dir) / "failures" / "critic"
        how = self.layout, self.critic.model.fsdp_config.reduce_gradients
        learner = Learner(self.model, optimizer, device, budget, self.critic.grad_clip, failure_dir, *how)
        schedule = Schedule.from_config(optim, total_training_steps)
        moved = residence(self.critic.model.fsdp_config, self.model, optimizer, device)
        super().__init__(schedule, learner, Resumable({"critic": self.model}, "critic", optimizer), moved)

    @torch.no_grad()
    def values(self, batch: TrainBatch) -> RankValues:
        """`value` [T] float32: at each of the loss mask's tokens in this rank's rows, that of the state before it.

        Raises NumericalError when one of them is not finite.
        """
        self.model.eval()
        critic = self.critic
        budget = micro_budget(
            critic.use_dynamic_bsz,
            critic.forward_max_token_len_per_gpu,
            critic.forward_micro_batch_size,
            self.layout.ranks_per_row,
        )
        value_T = torch.zeros(len(batch.tokens["ids"]))
        micro_batches = plan(batch.lengths_B, dist.get_world_size(), dist.get_rank(), budget, self.layout)
        with self.residence.during(Phase.SCORE):
            for rows in micro_batches:
                inputs = model_input(batch.select(rows), self.device, self.layout)
                value_T[flat_positions(batch.lengths_B, rows)[inputs.token_N]] = self.model(inputs).cpu()
            reshard(self.model)
        if not value_T.isfinite().all():
            raise NumericalError(f"step {self.step}: the critic's values are not finite; its weights have diverged")
        own = sorted(row for rows in micro_batches for row in rows)
        return RankValues(own, {"value": value_T[flat_positions(batch.lengths_B, own)]})

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """One RL step: `ppo_epochs` passes over `mini_batches` of `ppo_mini_batch_size` rows, one AdamW step for each.

        Needs `values` (from before the update) and `returns` in `batch.tokens`, [T] float32. Returns `critic/vf_loss`,
        `vf_clipfrac`, `vpred_mean` and `grad_norm`, means over the mini-batches of token means over all ranks, and
        `lr`; only `lr` when no token has a value. Raises NumericalError when a loss or gradient is not finite.
        """
        critic = self.critic
        lr = self.set_lr_of_step()
        cut = mini_batches(
            trained_rows(batch), critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle, self.seed, self.step
        )
        with self.residence.during(Phase.UPDATE):
            steps = [self.learner.learn(batch.select(rows), self.loss, self.step) for rows in cut]
            reshard(self.model)
        self.end_step()
        results = [{"vf_loss" if name == "loss" else name: means[name] for name in means} for means in steps if means]
        return mean_of(results, "critic") | {"critic/lr": lr}

    def loss(self, batch: TrainBatch, inputs: ModelInput) -> TokenLoss:
        """Clipped value loss per selected token of a micro-batch."""
        value_N = self.model(inputs)
        old_value_N, return_N = (values_at(batch, name, inputs) for name in ("values", "returns"))
        result = value_loss(value_N, old_value_N, return_N, self.critic.cliprange_value)
        reports = {"vf_clipfrac": result.clipped_T.float(), "vpred_mean": value_N.detach()}
        return TokenLoss(result.loss_T, reports)

    def load_saved(self, path: Path) -> None:
        """Replace the weights by a saved critic's; the optimizer starts anew. Raises CheckpointError."""
        load_saved(self.model, path)
        self.learner.optimizer.state.clear()

    def save_pretrained(self, path: str | Path, tokenizer: Any) -> None:
        """Save in Hugging Face format, usable as `critic.model.path`. Raises CheckpointError on every rank."""
        save_model(self.model, Path(path), tokenizer)
