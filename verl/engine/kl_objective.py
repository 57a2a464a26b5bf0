"""The KL between policy and anchor as a term of the actor's loss: sampled, Top-k, or exact over the vocabulary.

A Top-k KL sums over k = kl_topk_tokens tokens. For `full_reverse` they are the most likely ones under the policy before
the step's first update: `batch.tokens["top_index"]`, or, if that is missing, those of the same forward pass, since then
nothing was updated yet. For `full_forward` they are the anchor's most likely ones, computed when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verl.algorithms.kl import EXACT_KL, TOPK_KL, importance_weight, sampled_kl
from verl.config import ActorConfig
from verl.config.rules.predicates import has_exact_kl, policy_topk, topk_of
from verl.engine.anchor import AnchorReader
from verl.engine.batching import ModelInput, values_at
from verl.engine.head import TokenStats
from verl.errors import ConfigError
from verl.protocol import TrainBatch


class KLRequest(NamedTuple):
    """`requested`: fields of `head.HeadRequest` for the policy; `kl` computes the KL per token [N] from its output."""

    requested: dict[str, Any]
    kl: Callable[[TokenStats], torch.Tensor]


KLTerm = Callable[[TrainBatch, ModelInput], KLRequest]


def build_kl(actor: ActorConfig, anchor: AnchorReader | None) -> KLTerm:
    """The term that `kl_loss_type` and `kl_topk_tokens` name. Raises ConfigError when it needs an anchor."""
    if actor.kl_loss_type not in EXACT_KL:
        return SampledTerm(actor, anchor)
    if anchor is None:
        raise ConfigError(
            f"actor.kl_loss_type '{actor.kl_loss_type}' needs the anchor, but this engine was made without one"
        )
    return TopkTerm(actor, anchor) if topk_of(actor) else FullTerm(actor, anchor)


def reads_anchor(actor: ActorConfig, batch: TrainBatch) -> bool:
    """Whether the loss of a batch reads the anchor's weights, beside the policy's."""
    return has_exact_kl(actor) or (actor.use_kl_loss and "ref_log_probs" not in batch.tokens)


class SampledTerm:
    """A KL from the log-probs of the sampled token alone: `batch.tokens["ref_log_probs"]`, or read from the anchor."""

    def __init__(self, actor: ActorConfig, anchor: AnchorReader | None) -> None:
        self.actor = actor
        self.anchor = anchor
        self.estimate = sampled_kl(actor.kl_loss_type)

    def __call__(self, batch: TrainBatch, inputs: ModelInput) -> KLRequest:
        if self.anchor is None or "ref_log_probs" in batch.tokens:
            reference_N = values_at(batch, "ref_log_probs", inputs)
        else:
            reference_N = self.anchor.labels(inputs).log_prob_N

        def kl(stats: TokenStats) -> torch.Tensor:
            kl_N = self.estimate(stats.log_prob_N, reference_N)
            weight_N = _weight(self.actor, batch, inputs, stats)
            return kl_N if weight_N is None else weight_N * kl_N

        return KLRequest({}, kl)


class FullTerm:
    """The exact KL over the whole vocabulary, which needs the anchor's distribution too."""

    def __init__(self, actor: ActorConfig, anchor: AnchorReader) -> None:
        self.divergence = EXACT_KL[actor.kl_loss_type]
        self.anchor = anchor

    def __call__(self, batch: TrainBatch, inputs: ModelInput) -> KLRequest:
        def kl(stats: TokenStats) -> torch.Tensor:
            assert stats.kl_N is not None
            return stats.kl_N

        return KLRequest({"anchor": self.anchor.view(inputs, self.divergence)}, kl)


class TopkTerm:
    """A KL that is exact over k tokens, with a sampled estimate of the rest (algorithms/kl/topk.py)."""

    def __init__(self, actor: ActorConfig, anchor: AnchorReader) -> None:
        self.actor = actor
        self.anchor = anchor
        self.formula = TOPK_KL[actor.kl_loss_type]

    def __call__(self, batch: TrainBatch, inputs: ModelInput) -> KLRequest:
        k = topk_of(self.actor)
        if policy_topk(self.actor) and "top_index" not in batch.tokens:

            def kl_at_own_top(stats: TokenStats) -> torch.Tensor:
                assert stats.index_Nk is not None
                return self._kl(batch, inputs, stats, self.anchor.at(inputs, stats.index_Nk), stats.index_Nk)

            return KLRequest({"top_k": k}, kl_at_own_top)
        if policy_topk(self.actor):
            index_Nk = values_at(batch, "top_index", inputs).long()
            reference = self.anchor.at(inputs, index_Nk)
        else:
            reference = self.anchor.top(inputs, k)
            assert reference.index_Nk is not None
            index_Nk = reference.index_Nk
        return KLRequest({"index_Nk": index_Nk}, lambda stats: self._kl(batch, inputs, stats, reference, index_Nk))

    def _kl(
        self, batch: TrainBatch, inputs: ModelInput, stats: TokenStats, reference: TokenStats, index_Nk: torch.Tensor
    ) -> torch.Tensor:
        assert stats.log_prob_Nk is not None and reference.log_prob_Nk is not None
        return self.formula(
            stats.log_prob_Nk,
            reference.log_prob_Nk,
            stats.log_prob_N,
            reference.log_prob_N,
            (index_Nk == inputs.label_N[:, None]).any(-1),
            gradient=self.actor.kl_topk_gradient,
            tail=self.actor.kl_use_tail_sampling,
            weight_T=_weight(self.actor, batch, inputs, stats),
        )


def _weight(actor: ActorConfig, batch: TrainBatch, inputs: ModelInput, stats: TokenStats) -> torch.Tensor | None:
    """The importance weight of the sampled KL terms (`use_kl_iw`): how much more likely the token is now than when it
    was sampled. None when it is off.

    The sampler may be older than the policy before the step's first update, or compute less precisely.
    """
    if not actor.use_kl_iw:
        return None
    if "rollout_log_probs" in batch.tokens:
        sampler_N = values_at(batch, "rollout_log_probs", inputs)
    else:
        sampler_N = old_log_probs(batch, inputs, stats)
    return importance_weight(stats.log_prob_N, sampler_N, actor.kl_iw_clip_lower, actor.kl_iw_clip_upper)


def old_log_probs(batch: TrainBatch, inputs: ModelInput, stats: TokenStats) -> torch.Tensor:
    """[N] log-probs under the policy before the step's first optimizer step; without that column, under the current."""
    if "old_log_probs" not in batch.tokens:
        return stats.log_prob_N.detach()
    return values_at(batch, "old_log_probs", inputs)
