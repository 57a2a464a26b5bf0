"""The anchor, which may be the policy without its adapters, and what reads it for the loss: its distributions at the
tokens of a micro-batch, without gradient.

Its gathered weights are released at once, so that they take no memory beside the policy's activations. After `view`,
whose head is read again in the backward, `release` does that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl.algorithms.kl import ExactKL
from verl.engine.batching import ModelInput
from verl.engine.device.sharding import end_reading
from verl.engine.head import AnchorView, Head, TokenStats
from verl.engine.lora import adapters_off
from verl.engine.model import CausalModel


class AnchorReader:
    """Reads the anchor's weights as they are at the time of each call."""

    def __init__(self, anchor: CausalModel | ReferencePolicy, temperature: float) -> None:
        self.anchor = anchor
        self.temperature = temperature
        self._viewed = False

    @torch.no_grad()
    def view(self, inputs: ModelInput, divergence: ExactKL) -> AnchorView:
        """The anchor's hidden states and head, from which a KL over the whole vocabulary computes its distributions."""
        self.anchor.eval()
        self._viewed = True
        return AnchorView(self.anchor.hidden(inputs), self.anchor.head(), divergence)

    def labels(self, inputs: ModelInput) -> TokenStats:
        """Log-probs of the labels."""
        return self._read(inputs)

    def at(self, inputs: ModelInput, index_Nk: torch.Tensor) -> TokenStats:
        """Log-probs of the labels and of the ids `index_Nk`."""
        return self._read(inputs, index_Nk=index_Nk)

    def top(self, inputs: ModelInput, k: int) -> TokenStats:
        """Log-probs of the labels and of the anchor's own k most likely tokens, with their ids."""
        return self._read(inputs, top_k=k)

    @torch.no_grad()
    def _read(self, inputs: ModelInput, **requested: Any) -> TokenStats:
        self.anchor.eval()
        stats = self.anchor(inputs, self.temperature, **requested)
        end_reading(self.anchor)
        return stats

    def release(self) -> None:
        """Release the weights that `view` left gathered."""
        if self._viewed:
            end_reading(self.anchor)
            self._viewed = False


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
        """What `CausalModel.forward` returns, with adapters off."""
        with adapters_off(self.policy):
            stats: TokenStats = self.policy(inputs, temperature, **requested)
        return stats

    @torch.no_grad()
    def hidden(self, inputs: ModelInput) -> torch.Tensor:
        """What `CausalModel.hidden` returns, with adapters off."""
        with adapters_off(self.policy):
            return self.policy.hidden(inputs)

    def head(self) -> Head:
        """The policy's own head: no adapter changes it."""
        return self.policy.head()

    def train(self, mode: bool = True) -> ReferencePolicy:
        """Does nothing: the policy keeps its mode, as it may be in the middle of an update."""
        return self
