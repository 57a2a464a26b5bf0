"""Gradient accumulation over micro-batches and ranks, clipping, and the optimizer step: shared by RL and SFT.

The loss of a mini-batch is the weighted sum over its trained tokens on all ranks. Every rank works out the weights from
the whole mini-batch (1 / number of trained tokens by default), so nothing depends on how the mini-batch is cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.algorithms.aggregation import loss_weights
from verl.config.sections.model import OptimConfig
from verl.engine.batching import Layout, ModelInput, model_input, selected_tokens
from verl.engine.device.memory import device_memory
from verl.engine.device.sharding import is_main_rank, reduce_gradients
from verl.engine.micro_batches import Budget, plan
from verl.errors import NumericalError
from verl.protocol import TrainBatch

logger = logging.getLogger(__name__)


class TokenLoss(NamedTuple):
    """Loss per selected token [N] with gradient, and named detached values [N]: `reports`, whose token means are
    reported; `scores`, which `TokenScores` may keep token by token; and `parts`, which add up to the loss and are
    reported as `loss_part/{name}`, with the weights that the loss has.
    """

    loss_N: torch.Tensor
    reports: dict[str, torch.Tensor]
    scores: dict[str, torch.Tensor] = {}
    parts: dict[str, torch.Tensor] = {}


Reduction = Literal["micro_batch", "mini_batch"]
LossFunction = Callable[[TrainBatch, ModelInput], TokenLoss]
TokenWeights = Callable[[TrainBatch], torch.Tensor]


def token_mean(batch: TrainBatch) -> torch.Tensor:
    """[T] float32: every trained token counts the same."""
    mask_T = batch.tokens["loss_mask"]
    return loss_weights(mask_T, batch.row_of_token_T, len(batch), "token-mean")


@dataclass
class Learner:
    """A sharded model with its optimizer.

    `grad_clip` limits the global gradient norm; `failure_dir` receives a mini-batch that gave NaN or Inf. `layout` says
    how a micro-batch's rows lie, `reduction` after which of them gradients are reduced. `weigh` gives each token's
    weight [T] in the loss of a mini-batch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device
    budget: Budget
    grad_clip: float
    failure_dir: Path
    layout: Layout
    reduction: Reduction
    weigh: TokenWeights = token_mean

    def learn(self, batch: TrainBatch, loss: LossFunction, step: int) -> dict[str, float]:
        """One optimizer step on `batch`; returns its `loss`, `grad_norm`, and the reports' token means over all ranks.

        A batch without trained tokens changes nothing and returns {}. Raises NumericalError on every rank, before
        the weights change, when the loss or the gradient is not finite; `step`, from 1, is named there.
        """
        if not len(selected_tokens(batch)):
            return {}
        self.model.train()
        # Moments stay for the whole run, so they are made before gradients come and go (`make_moments`).
        if not self.optimizer.state:
            device_memory(self.device).give_back()
            make_moments(self.optimizer)
        means = self.accumulate(batch, loss)
        norm = clip_grad_norm(self.model, self.grad_clip)
        # Both numbers are those of all ranks, so that either all of them stop or none.
        if not (math.isfinite(norm) and math.isfinite(means["loss"])):
            self.optimizer.zero_grad()
            raise NumericalError(self._report(batch, step, means["loss"], norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return means | {"grad_norm": norm}

    def accumulate(self, batch: TrainBatch, loss: LossFunction) -> dict[str, float]:
        """Add the gradient of the batch's loss to the parameters' `.grad`; returns the loss and the reports' means."""
        # Tokens get their weights, and ranks their rows, before the batch is cut: the cut cannot change the loss.
        num_tokens = len(selected_tokens(batch))
        place = dist.get_world_size(), dist.get_rank()
        batch = replace(batch, tokens=batch.tokens | {"loss_weight": self.weigh(batch)})
        sums: dict[str, torch.Tensor] = {}
        related = self.layout.prefixes(batch), self.layout.units(batch)
        micro_batches = plan(batch.lengths_B, *place, self.budget, self.layout, *related)
        for number, rows in enumerate(micro_batches, 1):
            reduce_gradients(self.model, number == len(micro_batches), self.reduction == "micro_batch")
            micro_batch = batch.select(rows)
            inputs = model_input(micro_batch, self.device, self.layout)
            token_loss = loss(micro_batch, inputs)
            weight_N = micro_batch.tokens["loss_weight"][inputs.token_N].to(self.device)
            weighted_N = token_loss.loss_N * weight_N
            (weighted_N.sum() * place[0]).backward()  # sharded gradients are averaged over ranks; this is a sum

            # Reports are means over tokens; the loss and its parts keep the weights of the loss.
            found = {name: v_N.sum(dtype=torch.float64) / num_tokens for name, v_N in token_loss.reports.items()}
            parts = {f"loss_part/{name}": part_N * weight_N for name, part_N in token_loss.parts.items()}
            parts["loss"] = weighted_N.detach()
            found |= {name: part_N.sum(dtype=torch.float64) for name, part_N in parts.items()}
            sums = {name: sums[name] + value if sums else value for name, value in found.items()}
        total = torch.stack(list(sums.values())) / self.layout.ranks_per_row  # ranks that share rows have equal sums
        dist.all_reduce(total)
        return dict(zip(sums, total.tolist(), strict=True))

    def _report(self, batch: TrainBatch, step: int, loss: float, norm: float) -> str:
        path = self.failure_dir / f"not_finite_step_{step}.pt"
        if is_main_rank():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"lengths_B": batch.lengths_B, "tokens": dict(batch.tokens), "rows": dict(batch.rows)}, path)
        return (
            f"step {step}: loss {loss}, gradient norm {norm}; the weights were not changed. The mini-batch is in "
            f"{path}: look at its tensors (rewards, advantages, log-probs, values), then lower the learning rate or "
            "grad_clip"
        )


def clip_grad_norm(model: torch.nn.Module, limit: float) -> float:
    """Scale gradients down to a global norm of `limit`; returns the norm before. Every rank gets the same number."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the steps that the role has made: an actor makes none while its critic warms up.

    `min_lr_ratio` matters for `cosine` only.
    """

    lr: float
    warmup_steps: int
    total_steps: int
    style: str = "constant"
    min_lr_ratio: float = 0.0

    @classmethod
    def from_config(cls, optim: OptimConfig, run_steps: int) -> Schedule:
        """The schedule over `optim.total_training_steps` steps, or over the run's `run_steps` if that is negative."""
        total_steps = run_steps if optim.total_training_steps < 0 else optim.total_training_steps
        warmup_steps = int(optim.lr_warmup_steps_ratio * total_steps)
        return cls(optim.lr, warmup_steps, total_steps, optim.warmup_style, optim.min_lr_ratio or 0.0)

    def at(self, step: int) -> float:
        """The rate of step `step`, counted from 0; after the last step a cosine stays at its minimum."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine)


def build_adamw(parameters: Iterable[torch.nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW (decoupled weight decay, arXiv 1711.05101), as one fused kernel per device where PyTorch has it."""
    trainable = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trainable, optim.lr, optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter of an AdamW the moments that its first step would make: zeros, on the parameter's device.

    Moments stay. Made while gradients and gathered layers come and go, they would lie in what those leave, and the rest
    of that memory could never be returned to the device, where the engines could use it.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
