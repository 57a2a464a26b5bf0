"""What the actor minimises, per token:

loss = w policy_loss(l, l_old, A) - entropy_coeff H + kl_loss_coef KL / d + llds_coef LLDS

`w` corrects for the sampler's own probabilities (`tokens["correction"]`, else 1). `d` is what the advantages were
divided by when they were scaled by the batch's std s (`rows["adv_batch_std"]`): s + 1e-6, or 1 where s is 0; else 1.
Each term is reported as it stands here, with its coefficient (`parts`), and its policy_loss, H, KL (in nats, before d)
and LLDS as token means (`reports`).
"""

from __future__ import annotations

import torch

from verl.algorithms.advantages import batch_divisor
from verl.algorithms.aggregation import loss_weights
from verl.algorithms.likelihood import llds
from verl.algorithms.policy_loss import POLICY_LOSSES, Clip
from verl.config import ActorConfig
from verl.config.rules.predicates import policy_topk
from verl.engine.anchor import AnchorReader
from verl.engine.batching import ModelInput, RankValues, values_at
from verl.engine.kl_objective import build_kl, old_log_probs
from verl.engine.learner import TokenLoss
from verl.engine.model import CausalModel
from verl.protocol import TrainBatch


class PolicyObjective:
    """The actor's loss on one micro-batch; needs `advantages` [T] float32 in `batch.tokens`.

    Without `old_log_probs` [T] float32 the policy must not have been updated in this step: l_old is then l without
    gradient, and the ratio is 1. `kl_objective` says what the KL needs.
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
        mask_T, row_T = batch.tokens["loss_mask"], batch.row_of_token_T
        return loss_weights(mask_T, row_T, len(batch), self.actor.loss_agg_mode, self.actor.loss_scale_factor)

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
        row_N = batch.row_of_token_T[inputs.token_N].to(old_N.device)
        policy = self.policy_loss(stats.log_prob_N, old_N, advantage_N, row_N, self.clip)
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
    """[N] int64: what a gate of LLDS covers, a row (response) or a turn of a row (action), as one number."""
    row_T = batch.row_of_token_T
    unit_T = row_T if gate == "response" else row_T * len(row_T) + batch.turn_of_token_T
    return unit_T[inputs.token_N].to(inputs.label_N.device)
