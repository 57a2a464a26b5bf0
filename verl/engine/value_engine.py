"""The critic: values of the policy's tokens, and their regression on returns."""

from __future__ import annotations

from functools import partial

import torch

from verl.algorithms.value_loss import value_loss
from verl.config import Config
from verl.engine.batching import ModelInput, RankValues, values_at
from verl.engine.device.runtime import set_threads
from verl.engine.device.sequence_parallel import sequence_group
from verl.engine.device.sharding import end_reading
from verl.engine.files.loading import load_sharded_critic
from verl.engine.learner import TokenLoss
from verl.engine.micro_batches import mean_of
from verl.engine.model import ValueModel, layout_of
from verl.engine.trained import TrainedEngine
from verl.phases import Part
from verl.protocol import TrainBatch


class ValueEngine(TrainedEngine):
    """The value model. The batch's `loss_mask` says which tokens have a value."""

    trained = "critic"
    model: ValueModel

    def __init__(self, config: Config, device: torch.device, total_training_steps: int) -> None:
        """Load and shard `critic.model.path`. The process group must exist. Raises ConfigError."""
        self.critic, self.device = config.critic, device
        set_threads(config.actor_rollout_ref.actor.num_threads)
        settings = self.critic.model
        model = load_sharded_critic(settings, device, config.trainer.seed)
        sequence = sequence_group(device, self.critic.ulysses_sequence_parallel_size)
        layout = layout_of([model.model], settings.use_remove_padding, sequence)
        of_critic = settings.fsdp_config, {"critic": model}, layout, total_training_steps
        super().__init__(config, self.critic, *of_critic, failures="failures/critic")

    def values(self, batch: TrainBatch) -> RankValues:
        """`value` [T] float32: for each token of the loss mask in this rank's rows, the value of the state before it.

        Raises NumericalError when one of them is not finite.
        """
        critic = self.critic
        budget = self.budget(
            critic.use_dynamic_bsz, critic.forward_max_token_len_per_gpu, critic.forward_micro_batch_size
        )
        self.model.eval()
        release = partial(end_reading, self.model)
        return self.read(
            batch, budget, Part.PARAMETERS, lambda inputs: {"value": self.model(inputs)}, release, "the critic's values"
        )

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Train the critic for one RL step; see `TrainedEngine.update`.

        Needs `values` (from before the update) and `returns` in `batch.tokens`, [T] float32. Returns `critic/vf_loss`,
        `vf_clipfrac`, `vpred_mean` and `grad_norm`, means over the mini-batches of token means over all ranks, and
        `lr`; only `lr` when no token has a value. Raises NumericalError when a loss or gradient is not finite.
        """
        steps, lr = self.take_steps(batch, self.mini_batches(batch), lambda number: self.loss)
        results = [{"vf_loss" if name == "loss" else name: means[name] for name in means} for means in steps]
        return mean_of(results, "critic") | {"critic/lr": lr}

    def loss(self, batch: TrainBatch, inputs: ModelInput) -> TokenLoss:
        """Clipped value loss per selected token of a micro-batch."""
        value_N = self.model(inputs)
        old_value_N, return_N = (values_at(batch, name, inputs) for name in ("values", "returns"))
        result = value_loss(value_N, old_value_N, return_N, self.critic.cliprange_value)
        reports = {"vf_clipfrac": result.clipped_T.float(), "vpred_mean": value_N.detach()}
        return TokenLoss(result.loss_T, reports)
