"""What the trainer itself computed of the policy that sampled a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.protocol import TrainBatch


@dataclass(frozen=True)
class PolicyScores:
    """Log-probs and entropies [T] in nats at the tokens that `known_T` [T] bool names; None: they were not computed."""

    known_T: torch.Tensor
    log_prob_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: TrainBatch) -> PolicyScores:
        """Those of a pass before the update, over all of the loss mask's tokens."""
        return cls(batch.tokens["loss_mask"], batch.tokens.get("old_log_probs"), batch.tokens.get("entropy"))
