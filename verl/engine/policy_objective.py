"""What the actor minimises, per token:

    loss = w policy_loss(l, l_old, A) - entropy_coeff H + kl_loss_coef KL / d + llds_coef LLDS

`w` corrects for the sampler's own probabilities (`tokens["correction"]`, else 1). `d` is what the advantages were
divided by when they were scaled by the batch's std s (`rows["adv_batch_std"]`): s + 1e-6, or 1 where s is 0; else 1.
Each term is reported as it stands here, with its coefficient (`parts`), and its policy_loss, H, KL (in nats, before d)
and LLDS as token means (`reports`).

The KL between policy and anchor is sampled, Top-k, or exact over the vocabulary. A Top-k KL sums over k =
kl_topk_tokens tokens. For `full_reverse` they are the most likely ones under the policy before the step's first update:
`batch.tokens["top_index"]`, or, if that is missing, those of the same forward pass, since then nothing was updated yet.
For `full_forward` they are the anchor's most likely ones, computed when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from verl.algorithms.advantages import batch_divisor
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.kl import EXACT_KL, TOPK_KL, ExactKL, importance_weight, sampled_kl
from verl.algorithms.likelihood import llds
from verl.algorithms.policy_loss import POLICY_LOSSES, Clip
from verl.config import ActorConfig
from verl.config.rules.predicates import has_exact_kl, policy_topk, topk_of
from verl.engine.batching import ModelInput, RankValues, values_at
from verl.engine.device.sharding import end_reading
from verl.engine.head import AnchorView, TokenStats
from verl.engine.learner import TokenLoss
from verl.engine.model import CausalModel, ReferencePolicy
from verl.errors import ConfigError
from verl.protocol import TrainBatch


class AnchorReader:
    """Reads the anchor's weights as they are at the time of each call, without gradient.

    They are released at once, so that they take no memory beside the policy's activations; after `view`, whose head is
    read again in the backward, `release` does that.
    """

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
        # The policy's top k in a single step: the forward pass of the update finds them itself.
        if policy_topk(self.actor) and "top_index" not in batch.tokens:

            def kl_at_own_top(stats: TokenStats) -> torch.Tensor:
                assert stats.index_Nk is not None
                return self._kl(batch, inputs, stats, self.anchor.at(inputs, stats.index_Nk), stats.index_Nk)

            return KLRequest({"top_k": k}, kl_at_own_top)
        # Else they come with the batch, or, for a forward KL, are the anchor's top k.
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


class PolicyObjective:
    """The actor's loss on one micro-batch; needs `advantages` [T] float32 in `batch.tokens`.

    Without `old_log_probs` [T] float32 the policy must not have been updated in this step: l_old is then l without
    gradient, and the ratio is 1. `build_kl` says what the KL needs.
    """

    def __init__(
        self,
        actor: ActorConfig,
        model: CausalModel,
        temperature: float,
        anchor: AnchorReader | None,
        trains: bool = True,
    ) -> None:
        """Raises ConfigError when the KL needs an anchor and there is none; without `trains` there is no KL."""
        self.actor = actor
        self.model = model
        self.temperature = temperature
        self.policy_loss = POLICY_LOSSES[actor.policy_loss]
        low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        self.clip = Clip(low, high, actor.clip_ratio_c)
        self.kl = build_kl(actor, anchor) if actor.use_kl_loss and trains else None

    def weigh(self, batch: TrainBatch) -> torch.Tensor:
        """The weight [T] of each token in the loss of a mini-batch (`actor.loss_agg_mode`)."""
        mask_T, rollout_T, actor = batch.tokens["loss_mask"], batch.rollout_of_token_T, self.actor
        return loss_weights(mask_T, rollout_T, batch.num_rollouts, actor.loss_agg_mode, actor.loss_scale_factor)

    def __call__(self, batch: TrainBatch, inputs: ModelInput, moved: bool = True) -> TokenLoss:
        """Loss and reports per selected token of a micro-batch.

        `moved`: whether the policy may differ from the one of `old_log_probs`. If not, no likelihood fell, and what
        the two seem to differ by is rounding, which LLDS must not follow.
        """
        actor = self.actor

        # One forward pass, which also computes what the KL asks for.
        request = None if self.kl is None else self.kl(batch, inputs)
        requested = {} if request is None else request.requested
        stats = self.model(inputs, self.temperature, entropy_gradient=actor.entropy_coeff != 0, **requested)

        # The policy loss, and what is reported of it.
        old_N, advantage_N = old_log_probs(batch, inputs, stats), values_at(batch, "advantages", inputs)
        rollout_N = batch.rollout_of_token_T[inputs.token_N].to(old_N.device)
        policy = self.policy_loss(stats.log_prob_N, old_N, advantage_N, rollout_N, self.clip)
        reports = {
            "pg_loss": policy.loss_T.detach(),
            "pg_clipfrac": policy.clipped_T.float(),
            "ppo_kl": old_N - stats.log_prob_N.detach(),
            "entropy_loss": stats.entropy_N.detach(),
        }
        scores = {"log_prob": stats.log_prob_N.detach(), "entropy": stats.entropy_N.detach()}
        terms = {"policy": policy.loss_T}
        if "correction" in batch.tokens:
            terms["policy"] = policy.loss_T * values_at(batch, "correction", inputs)

        # The other terms, each with its coefficient.
        if actor.entropy_coeff:
            terms["entropy"] = -actor.entropy_coeff * stats.entropy_N
        if request is not None:
            raw_N = request.kl(stats)
            scores["kl"] = raw_N.detach()
            reports["kl_loss"] = raw_N.detach()
            terms["kl"] = actor.kl_loss_coef * (raw_N / _kl_divisor(batch, inputs))
        if actor.llds_coef:
            before_N = old_N if moved else stats.log_prob_N.detach()
            fallen_N = llds(stats.log_prob_N, before_N, advantage_N, _gate_units(batch, inputs, actor.llds_gate))
            terms["llds"] = actor.llds_coef * fallen_N
            reports["llds_loss"] = fallen_N.detach()
        parts = {name: term_N.detach() for name, term_N in terms.items()}
        return TokenLoss(sum(terms.values(), start=torch.zeros_like(policy.loss_T)), reports, scores, parts)


def require_old_policy(actor: ActorConfig, batch: TrainBatch, own: RankValues | None, num_steps: int) -> None:
    """Raise ValueError when several optimizer steps lack values of the policy from before the first one."""
    if num_steps < 2:
        return
    there = batch.tokens.keys() | (own.tokens.keys() if own is not None else set())
    needed = ["old_log_probs"] + ["top_index"] * (policy_topk(actor) > 0)
    if missing := [name for name in needed if name not in there]:
        raise ValueError(
            f"several optimizer steps on a batch need tokens['{missing[0]}'] of the policy before the first one: "
            "call log_probs before the update"
        )


def _kl_divisor(batch: TrainBatch, inputs: ModelInput) -> torch.Tensor | float:
    if "adv_batch_std" not in batch.rows:
        return 1.0
    std_N = batch.rows["adv_batch_std"].repeat_interleave(batch.lengths_B)[inputs.token_N]
    return batch_divisor(std_N).to(inputs.label_N.device)


def _gate_units(batch: TrainBatch, inputs: ModelInput, gate: str) -> torch.Tensor:
    """[N] int64: what a gate of LLDS covers, a rollout (response) or a turn of it (action), as one number."""
    unit_T = batch.rollout_of_token_T
    if gate == "action":
        unit_T = unit_T * 2**31 + batch.turn_of_token_T  # int32 holds the number of a turn
    return unit_T[inputs.token_N].to(inputs.label_N.device)
