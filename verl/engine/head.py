"""The output head in chunks of tokens: [tokens, vocabulary] is never held for more than one chunk.

Each chunk runs under activation checkpointing: its logits are freed after the forward and computed again in the
backward. Everything is float32 from the head's product on, whatever format the decoder ran in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from verl.algorithms.entropy import entropy

ExactKL = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Head(NamedTuple):
    """Output projection: `weight_VH` and an optional `bias_V`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None

    def in_float32(self) -> Head:
        return Head(self.weight_VH.float(), None if self.bias_V is None else self.bias_V.float())

    def logits(self, hidden_NH: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, V] float32 logits over `temperature`."""
        return functional.linear(hidden_NH.float(), self.weight_VH, self.bias_V) / temperature


class AnchorView(NamedTuple):
    """What an exact KL needs of the anchor: its hidden states at the same tokens, its head, and the formula."""

    hidden_NH: torch.Tensor
    head: Head
    divergence: ExactKL


class TokenStats(NamedTuple):
    """Per selected token, float32: log-prob of the label, entropy in nats, exact KL (None without an anchor)."""

    log_prob_N: torch.Tensor
    entropy_N: torch.Tensor
    kl_N: torch.Tensor | None


def token_stats(
    hidden_NH: torch.Tensor,
    head: Head,
    label_N: torch.Tensor,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = True,
    anchor: AnchorView | None = None,
) -> TokenStats:
    """Log-prob, entropy and KL of each token under softmax(logits / temperature).

    `entropy_gradient` false computes the entropy for reporting only. With no token at all the result is empty but
    still hangs on the head's weights, so that a backward gives them a zero gradient.
    """
    head = head.in_float32()
    if anchor is not None:
        anchor = anchor._replace(head=anchor.head.in_float32())
    chunks = []
    for start in range(0, max(1, len(label_N)), chunk_tokens):
        span = slice(start, start + chunk_tokens)
        part = None if anchor is None else anchor._replace(hidden_NH=anchor.hidden_NH[span])
        arguments = (hidden_NH[span], head, label_N[span], temperature, entropy_gradient, part)
        if torch.is_grad_enabled():
            chunks.append(checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_chunk(*arguments))
    log_prob_N, entropy_N, kl_N = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return TokenStats(log_prob_N, entropy_N, kl_N if anchor is not None else None)


def _chunk(
    hidden_NH: torch.Tensor,
    head: Head,
    label_N: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
    anchor: AnchorView | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits_NV = head.logits(hidden_NH, temperature)
    log_prob_N = logits_NV.log_softmax(-1).gather(-1, label_N[:, None]).squeeze(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
        entropy_N = entropy(logits_NV)
    if anchor is None:
        return log_prob_N, entropy_N, entropy_N
    with torch.no_grad():
        anchor_logits_NV = anchor.head.logits(anchor.hidden_NH, temperature)
    return log_prob_N, entropy_N, anchor.divergence(logits_NV, anchor_logits_NV)
