"""What the loss may see of the anchor: its distributions at the tokens of a micro-batch, without gradient."""

from __future__ import annotations

import torch

from verl.algorithms.kl import ExactKL
from verl.engine.batching import ModelInput
from verl.engine.head import AnchorView, TokenStats
from verl.engine.model import CausalModel
from verl.engine.reference_policy import ReferencePolicy


class AnchorReader:
    """Reads the anchor's weights as they are when it is asked."""

    def __init__(self, anchor: CausalModel | ReferencePolicy, temperature: float) -> None:
        self.anchor = anchor
        self.temperature = temperature

    @torch.no_grad()
    def view(self, inputs: ModelInput, divergence: ExactKL) -> AnchorView:
        """For a KL over the whole vocabulary."""
        self.anchor.eval()
        return AnchorView(self.anchor.hidden(inputs), self.anchor.head(), divergence)

    @torch.no_grad()
    def at(self, inputs: ModelInput, index_Nk: torch.Tensor) -> TokenStats:
        """Log-probs of the labels and of the ids `index_Nk`."""
        self.anchor.eval()
        return self.anchor(inputs, self.temperature, index_Nk=index_Nk)

    @torch.no_grad()
    def top(self, inputs: ModelInput, k: int) -> TokenStats:
        """Log-probs of the labels and of the anchor's own k most likely tokens, with their ids."""
        self.anchor.eval()
        return self.anchor(inputs, self.temperature, top_k=k)
