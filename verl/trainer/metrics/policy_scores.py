"""The trainer's own log-probs and entropies of the policy that sampled a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl.protocol import TrainBatch


@dataclass(frozen=True)
class PolicyScores:
    """Log-probs and entropies [T] in nats at the tokens where `known_T` [T] bool is True; None: not computed."""

    known_T: torch.Tensor
    log_prob_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: TrainBatch) -> PolicyScores:
        """The scores of a pass before the update, over all tokens of the loss mask."""
        return cls(batch.tokens["loss_mask"], batch.tokens.get("old_log_probs"), batch.tokens.get("entropy"))
