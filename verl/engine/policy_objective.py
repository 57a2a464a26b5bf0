"""What the actor minimises, per token:

loss = policy loss(l, l_old, A) - entropy_coeff H + kl_loss_coef KL(policy, anchor) / (batch std of advantages + 1e-6)

The last divisor is there only when the advantages were scaled by the batch std (`rows["adv_batch_std"]`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.algorithms.advantages import EPSILON
from verl.algorithms.kl import EXACT_KL, SAMPLED_KL
from verl.algorithms.policy_loss import POLICY_LOSSES
from verl.config import ActorConfig
from verl.engine.batching import ModelInput
from verl.engine.head import AnchorView
from verl.engine.learner import TokenLoss
from verl.engine.model import CausalModel
from verl.errors import ConfigError
from verl.protocol import TrainBatch

AnchorLook = Callable[[ModelInput], AnchorView]


class PolicyObjective:
    """The actor's loss on one micro-batch; needs `advantages` and `old_log_probs` [T] float32 in `batch.tokens`.

    A sampled KL also needs `ref_log_probs` [T]; an exact one asks `look` for the anchor's hidden states.
    """

    def __init__(self, actor: ActorConfig, model: CausalModel, temperature: float, look: AnchorLook | None) -> None:
        """Raises ConfigError for an unknown loss or KL, or an exact KL without an anchor."""
        if actor.policy_loss not in POLICY_LOSSES:
            raise ConfigError(f"actor.policy_loss '{actor.policy_loss}' is unknown; use {', '.join(POLICY_LOSSES)}")
        self.actor = actor
        self.model = model
        self.temperature = temperature
        self.policy_loss = POLICY_LOSSES[actor.policy_loss]
        self.clip_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
        self.clip_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
        self.look = look if actor.use_kl_loss and actor.kl_loss_type in EXACT_KL else None
        if actor.use_kl_loss and self.look is None:
            self._require_sampled(actor.kl_loss_type)

    def __call__(self, batch: TrainBatch, inputs: ModelInput) -> TokenLoss:
        """Loss and reports per selected token of a micro-batch."""
        actor = self.actor
        view = None if self.look is None else self.look(inputs)
        stats = self.model(inputs, self.temperature, actor.entropy_coeff != 0, view)
        old_log_prob_N = self._tokens(batch, "old_log_probs", inputs)
        policy = self.policy_loss(
            stats.log_prob_N, old_log_prob_N, self._tokens(batch, "advantages", inputs), self.clip_low, self.clip_high
        )
        loss_N = policy.loss_T - actor.entropy_coeff * stats.entropy_N
        reports = {
            "pg_loss": policy.loss_T.detach(),
            "pg_clipfrac": policy.clipped_T.float(),
            "ppo_kl": old_log_prob_N - stats.log_prob_N.detach(),
            "entropy_loss": stats.entropy_N.detach(),
        }
        if actor.use_kl_loss:
            kl_N = self._kl(batch, inputs, stats.log_prob_N, stats.kl_N)
            loss_N = loss_N + actor.kl_loss_coef * kl_N
            reports["kl_loss"] = kl_N.detach()
        return TokenLoss(loss_N, reports)

    def _kl(
        self, batch: TrainBatch, inputs: ModelInput, log_prob_N: torch.Tensor, exact_N: torch.Tensor | None
    ) -> torch.Tensor:
        if exact_N is None:
            reference_N = self._tokens(batch, "ref_log_probs", inputs)
            exact_N = SAMPLED_KL[self.actor.kl_loss_type](log_prob_N, reference_N)
        if "adv_batch_std" not in batch.rows:
            return exact_N
        std_N = batch.rows["adv_batch_std"].repeat_interleave(batch.lengths_B)[inputs.token_N]
        return exact_N / (std_N.to(exact_N.device) + EPSILON)

    def _tokens(self, batch: TrainBatch, name: str, inputs: ModelInput) -> torch.Tensor:
        if name not in batch.tokens:
            raise ValueError(f"the batch has no tokens['{name}']; it has {', '.join(batch.tokens)}")
        return batch.tokens[name][inputs.token_N].to(inputs.label_N.device)

    @staticmethod
    def _require_sampled(kind: str) -> None:
        if kind in EXACT_KL:
            raise ConfigError(f"actor.kl_loss_type '{kind}' needs the anchor, but this engine was made without one")
        if kind not in SAMPLED_KL:
            known = ", ".join([*SAMPLED_KL, *EXACT_KL])
            raise ConfigError(f"actor.kl_loss_type '{kind}' is not available; use one of {known}")
