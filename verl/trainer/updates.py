"""The part of a step that changes weights: critic and actor learn, and the anchor follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from verl.config import Config
from verl.config.rules.predicates import anchor_moves, scores_in_update, stores_token_values
from verl.engine.token_values import POLICY_SCORES
from verl.protocol import Status, TrainBatch, Trajectory
from verl.single_controller.waiting import Call
from verl.tracking.spans import Timer
from verl.trainer.estimates import for_critic
from verl.trainer.metrics.health import PolicyScores
from verl.workers.roles import ActorGroup, CriticGroup

COLUMN_OF = {"log_prob": "log_probs"}  # the batch's column of a score of the engine, where its name is another


class Updates:
    """The updates of one run's roles."""

    def __init__(self, config: Config, actor: ActorGroup, critic: CriticGroup | None) -> None:
        self.config, self.actor, self.critic = config, actor, critic

    def kept(self, trajectories: Sequence[Trajectory]) -> torch.Tensor | None:
        """[T] bool: the tokens that the settings leave in the losses; None: all of them.

        `algorithm.filter_overlong` leaves out trajectories that were cut off, `agent.train_summaries=false` summaries.
        """
        without_overlong = self.config.algorithm.filter_overlong
        with_summaries = self.config.agent.compact_at is None or self.config.agent.train_summaries
        if with_summaries and not without_overlong:
            return None
        # One flag for each token of the batch, whose tokens are those of the trajectories in this order.
        kept: list[bool] = []
        for trajectory in trajectories:
            if without_overlong and trajectory.status is Status.LENGTH_LIMIT:
                kept += [False] * trajectory.num_tokens
            elif with_summaries:
                kept += [True] * trajectory.num_tokens
            else:
                kept += [not of_summary for of_summary in trajectory.summary_mask]
        return torch.tensor(kept)

    def run(
        self, batch: TrainBatch, trained: TrainBatch, step: int, timed: Timer, sync: Callable[[], None]
    ) -> dict[str, float]:
        """Update critic and actor, then `sync`, which gives the engines the new weights. Returns metrics.

        `trained` is `batch` as the losses see it. If the update scores the policy, `log_probs` and `entropy` [T] are
        added to `trained.tokens`; if token values are stored, also `kl` [T] of a KL in the loss. A critic on its own
        GPUs is waited for last, since it runs in parallel.
        """
        metrics: dict[str, float] = {}
        beside: list[Call] = []
        # On its own GPUs the critic trains beside the actor; else the two train one after the other.
        if self.critic is not None:
            with timed("update_critic"):
                begun = self.critic.begin_update(for_critic(batch, self.config.algorithm, trained))
                if self.critic.apart:
                    beside.append(begun)
                else:
                    metrics |= begun()[0]
        # The first steps may be for the critic alone.
        if step > self.config.trainer.critic_warmup:
            with timed("update_actor"):
                metrics |= self._update_actor(trained, beside)
            metrics |= self._follow_anchor(step, timed)
        sync()
        for begun in beside:
            with timed("update_critic"):
                metrics |= begun()[0]
        return metrics

    def scores(self, batch: TrainBatch, trained: TrainBatch) -> PolicyScores:
        """The scores of the update, for the tokens that were `trained`; else those from before it, for all tokens."""
        if scores_in_update(self.config) and "log_probs" in trained.tokens:
            tokens = trained.tokens
            return PolicyScores(tokens["loss_mask"], tokens["log_probs"], tokens["entropy"])
        scores = PolicyScores.of(batch)
        if self.config.actor_rollout_ref.actor.use_rollout_log_probs:  # the sampler's own say nothing about a mismatch
            return replace(scores, log_prob_T=batch.tokens.get("log_probs"))
        return scores

    def _update_actor(self, trained: TrainBatch, beside: Sequence[Call]) -> dict[str, float]:
        keeps_kl = stores_token_values(self.config) and self.config.actor_rollout_ref.actor.use_kl_loss
        names = [*(POLICY_SCORES if scores_in_update(self.config) else ()), *(["kl"] if keeps_kl else [])]
        if not names:
            return self.actor.update(trained, beside)
        metrics, scores = self.actor.update_and_score(trained, beside, names)
        trained.tokens |= {COLUMN_OF.get(name, name): value_T for name, value_T in scores.items()}
        return metrics

    def _follow_anchor(self, step: int, timed: Timer) -> dict[str, float]:
        tau, period = self.config.algorithm.ref_policy_ema_tau, self.config.algorithm.ref_policy_ema_update_period
        if not anchor_moves(self.config) or step % period:
            return {}
        with timed("update_ref_policy_ema"):
            self.actor.follow_anchor(tau)
        return {"ref_policy/ema_tau": tau}
