"""The reference policy of a run that trains adapters: the policy without them, in the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.engine.batching import ModelInput
from verl.engine.head import Head, TokenStats
from verl.engine.lora import adapters_off
from verl.engine.model import CausalModel


class ReferencePolicy(nn.Module):
    """Computes like a `CausalModel` with the weights that `policy` started from. Has no parameters of its own."""

    def __init__(self, policy: CausalModel) -> None:
        super().__init__()
        self.policy = policy

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model, with adapters."""
        return self.policy.model

    @torch.no_grad()
    def forward(self, inputs: ModelInput, temperature: float, **requested: Any) -> TokenStats:
        """Like the policy's, with adapters off."""
        with adapters_off(self.policy):
            stats: TokenStats = self.policy(inputs, temperature, **requested)
        return stats

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        """Like the policy's, with adapters off."""
        with adapters_off(self.policy):
            return self.policy.hidden(inputs)

    def head(self) -> Head:
        """The policy's own: no adapter changes it."""
        return self.policy.head()

    def train(self, mode: bool = True) -> ReferencePolicy:
        """Does nothing: the policy keeps its mode, as it may be in the middle of an update."""
        return self
