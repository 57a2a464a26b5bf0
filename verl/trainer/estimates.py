"""From a batch of scored trajectories to what the updates need: log-probs, values, rewards per token, advantages.

What is estimated belongs to rollouts: the policy tokens of all sequences of one, in order, are its chain of actions.
Masks are set last: what is left out of the losses (rejected tokens, cut trajectories) still counts in the estimates.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from verl.algorithms.advantages import ADVANTAGES, AdvantageInput, AdvantageSettings
from verl.algorithms.kl import AdaptiveKL, FixedKL, KLController, kl_to_go, penalised_rewards, sampled_kl
from verl.algorithms.rollout_correction import CorrectionSettings, rollout_correction
from verl.config import AlgorithmConfig, Config, KlCtrlConfig
from verl.config.rules.predicates import (
    corrects_rollout,
    has_kl_in_reward,
    needs_ref_log_probs,
    policy_topk,
    scores_in_update,
)
from verl.protocol import TrainBatch
from verl.tracking.spans import Timer
from verl.workers.roles import ActorGroup, CriticGroup


class Estimator:
    """Adds estimates to a batch. The weight of a KL in the reward lives here, as it may change from step to step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.actor_config = config.actor_rollout_ref.actor
        self.kl_in_reward = has_kl_in_reward(config)
        self.scores_policy = not scores_in_update(config)
        self.kl_weight = build_controller(config.algorithm.kl_ctrl)

    def prepare(
        self, batch: TrainBatch, actor: ActorGroup, critic: CriticGroup | None, timed: Timer
    ) -> dict[str, float]:
        """Add to `batch.tokens` [T]: `advantages`, `old_log_probs` and `entropy` unless the update finds them, and
        where they are used `ref_log_probs`, `values`, `returns`, `rewards`, `kl`, `correction`, `keep`. If the old
        log-probs are the sampler's, but the Top-k KL needs a pass, the trainer's own are `log_probs`.

        Returns metrics.
        """
        # A critic on its own GPUs computes its values beside the actor's passes, so it begins first.
        values = None if critic is None else critic.begin_values(for_critic(batch, self.config.algorithm))
        if self.actor_config.use_rollout_log_probs:
            batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
        top_k = policy_topk(self.actor_config)
        if self.scores_policy and (top_k or not self.actor_config.use_rollout_log_probs):
            with timed("old_log_prob"):
                found = actor.log_probs(batch, top_k=top_k)
            batch.tokens["entropy"] = found["entropy"]
            column = "log_probs" if self.actor_config.use_rollout_log_probs else "old_log_probs"
            batch.tokens[column] = found["log_prob"]
        if needs_ref_log_probs(self.config):
            with timed("ref"):
                batch.tokens["ref_log_probs"] = actor.log_probs(batch, of="anchor")["log_prob"]
        if values is not None:
            with timed("values"):
                batch.tokens["values"] = values()
        with timed("adv"):
            return self._correct(batch) | self._advantages(batch)

    def _correct(self, batch: TrainBatch) -> dict[str, float]:
        if not corrects_rollout(self.actor_config):
            return {}
        config = self.actor_config.rollout_correction
        correction = rollout_correction(
            batch.tokens["old_log_probs"],
            batch.tokens["rollout_log_probs"],
            batch.tokens["loss_mask"],
            batch.rollout_of_token_T,
            batch.num_rollouts,
            CorrectionSettings(
                config.importance, config.importance_cap, config.reject, config.reject_low, config.reject_high
            ),
        )
        # Rejected tokens still count in the estimates: `for_losses` masks them later.
        batch.tokens["correction"] = correction.weight_T
        batch.tokens["keep"] = correction.keep_T
        return {f"rollout_correction/{name}": value for name, value in correction.metrics.items()}

    def _advantages(self, batch: TrainBatch) -> dict[str, float]:
        algorithm, mask_T, row_T = self.config.algorithm, batch.tokens["loss_mask"], batch.rollout_of_token_T
        reward_T = token_rewards(batch)

        # The KL is a cost of each token, with a weight that may follow the KL of the step.
        metrics: dict[str, float] = {}
        kl_T, weight = torch.zeros_like(reward_T), 0.0
        if self.kl_in_reward:
            kl_T = sampled_kl(algorithm.kl_penalty)(batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])
            weight = self.kl_weight.value
            mean = float(kl_T[mask_T].mean())
            self.kl_weight.update(mean, batch.num_rollouts)
            metrics = {"critic/kl": mean, "critic/kl_coeff": weight}
            batch.tokens["kl"] = kl_T

        # It is taken off the rewards, or off the advantages that are estimated from them.
        if not algorithm.apply_kl_after_advantage:
            reward_T = penalised_rewards(reward_T, kl_T, mask_T, weight)
        scale = "group_std" if algorithm.norm_adv_by_std_in_grpo else "none"
        if algorithm.norm_adv_by_batch_std:
            scale = "batch_std"
        found = ADVANTAGES[algorithm.adv_estimator](
            AdvantageInput(
                reward_T,
                mask_T,
                row_T,
                batch.of_rollouts(batch.rows["group"]),
                batch.tokens.get("values"),
                batch.of_rollouts(batch.rows["baseline"]) if "baseline" in batch.rows else None,
                response_mask(batch) if algorithm.gae_over_environment_tokens else None,
                batch.turn_of_token_T,
            ),
            AdvantageSettings(algorithm.gamma, algorithm.lam, scale),
        )
        advantage_T = found.advantage_T
        if algorithm.apply_kl_after_advantage:
            cost_T = kl_to_go(kl_T, mask_T, row_T) if algorithm.use_future_kl_as_reward else kl_T
            advantage_T = penalised_rewards(advantage_T, cost_T, mask_T, weight)

        # Columns for the losses.
        batch.tokens |= {"rewards": reward_T, "advantages": advantage_T}
        if found.return_T is not None:
            batch.tokens["returns"] = found.return_T
        if found.batch_std is not None:
            batch.rows["adv_batch_std"] = found.batch_std.float().expand(len(batch))
            metrics["actor/adv_batch_std"] = float(found.batch_std)
        return metrics


def build_controller(config: KlCtrlConfig) -> KLController:
    if config.type == "fixed":
        return FixedKL(config.kl_coef)
    assert config.target_kl is not None and config.horizon is not None
    return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)


def token_rewards(batch: TrainBatch) -> torch.Tensor:
    """[T] float32: a rollout's reward at its last policy token, 0 elsewhere; what a turn of it was given, at the last
    token of the turn.
    """
    mask_T, rollout_T = batch.tokens["loss_mask"], batch.rollout_of_token_T
    position_T = torch.arange(len(mask_T))
    last_R = torch.full((batch.num_rollouts,), -1).scatter_reduce(0, rollout_T[mask_T], position_T[mask_T], "amax")
    reward_T = torch.zeros(len(mask_T))
    has_policy_R = last_R >= 0
    reward_R = batch.of_rollouts(batch.rows["reward"])
    if "turn_rewards" in batch.tokens:
        reward_T += batch.tokens["turn_rewards"]
        reward_R = reward_R - torch.zeros_like(reward_R).index_add(0, rollout_T, reward_T)
    reward_T[last_R[has_policy_R]] += reward_R[has_policy_R]
    return reward_T


def response_mask(batch: TrainBatch) -> torch.Tensor:
    """[T] bool: everything from a row's first policy token on."""
    mask_T = batch.tokens["loss_mask"]
    so_far_T = mask_T.cumsum(0)
    before_B = torch.cat([so_far_T.new_zeros(1), so_far_T])[batch.lengths_B.cumsum(0) - batch.lengths_B]
    return so_far_T > before_B[batch.row_of_token_T]


def for_critic(batch: TrainBatch, algorithm: AlgorithmConfig, trained: TrainBatch | None = None) -> TrainBatch:
    """The batch with the tokens that the critic has a value for as its loss mask.

    `trained`: the batch as the losses see it. Policy tokens that it leaves out teach the critic nothing, nor does
    anything of a row without any left.
    """
    if trained is None:
        trained = batch
    if not algorithm.gae_over_environment_tokens:
        return trained
    trained_T = trained.tokens["loss_mask"]
    has_trained_B = batch.row_of_token_T[trained_T].bincount(minlength=len(batch)) > 0
    mask_T = response_mask(batch) & (trained_T | ~batch.tokens["loss_mask"]) & has_trained_B[batch.row_of_token_T]
    return replace(trained, tokens=trained.tokens | {"loss_mask": mask_T})


def for_losses(batch: TrainBatch, kept_T: torch.Tensor | None = None) -> TrainBatch:
    """The batch without what is left out of the losses: rejected tokens, and those where `kept_T` [T] is False."""
    mask_T = batch.tokens["loss_mask"]
    if "keep" in batch.tokens:
        mask_T = mask_T & batch.tokens["keep"]
    if kept_T is not None:
        mask_T = mask_T & kept_T
    return replace(batch, tokens=batch.tokens | {"loss_mask": mask_T})
