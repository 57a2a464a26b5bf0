"""AdamW and its learning-rate schedule.

The rate of RL step k (from 0), for `warmup` steps out of `total`:

    k < warmup:   lr (k + 1) / warmup                       the first step already learns
    constant:     lr
    cosine:       lr (m + (1 - m) (1 + cos(pi p)) / 2),     p = (k - warmup) / (total - warmup), m = min_lr_ratio

It changes once per RL step, not per mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from verl.config.model import OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Learning rate as a function of the RL step. `min_lr_ratio` matters for `cosine` only."""

    lr: float
    warmup_steps: int
    total_steps: int
    style: str = "constant"
    min_lr_ratio: float = 0.0

    @classmethod
    def from_config(cls, optim: OptimConfig, run_steps: int) -> Schedule:
        """Over `optim.total_training_steps` steps, or over the run's `run_steps` if that is negative."""
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
    """Decoupled weight decay (arXiv 1711.05101); one fused kernel per device where PyTorch has it."""
    trainable = [p for p in parameters if p.requires_grad]
    return torch.optim.AdamW(
        trainable, optim.lr, optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
