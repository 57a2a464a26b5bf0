"""What an update finds of the policy reaches the health metrics, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from verl.config import load_config
from verl.protocol import TrainBatch
from verl.tracking.timing import Timer
from verl.trainer.health import health_metrics
from verl.trainer.updates import Updates


class Workers:
    """Stands for the actor's workers: each token's log-prob is -2, its entropy 0.5, where the loss mask is."""

    def update(self, batch: TrainBatch, beside: object) -> dict[str, float]:
        return {"actor/way": 0.0}

    def update_and_score(self, batch: TrainBatch, beside: object) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        mask_T = batch.tokens["loss_mask"].float()
        return {"actor/way": 1.0}, {"log_prob": -2 * mask_T, "entropy": 0.5 * mask_T}


def make_batch() -> TrainBatch:
    """Two rows; tokens 1 and 2 of the first and 1 of the second are the policy's, sampled at -1.5 nats."""
    mask_T = torch.tensor([False, True, True, False, True])
    tokens = {"ids": torch.arange(5), "loss_mask": mask_T, "rollout_log_probs": torch.full((5,), -1.5)}
    return TrainBatch(torch.tensor([3, 2]), tokens)


def make_updates(*overrides: str) -> Updates:
    required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    group = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2"]
    workers: Any = Workers()
    return Updates(load_config("ppo_trainer", [*required, *group, *overrides]), workers, None)


@pytest.mark.parametrize("from_rollout", [False, True])
def test_scores_of_the_update(from_rollout: bool) -> None:
    """The second row is left out of the losses, so nothing is known of it."""
    updates = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2048",
        f"actor_rollout_ref.actor.use_rollout_log_probs={str(from_rollout).lower()}",
    )
    batch = make_batch()
    if from_rollout:
        batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    kept_T = batch.tokens["loss_mask"] & (batch.row_of_token_T == 0)
    trained = replace(batch, tokens=batch.tokens | {"loss_mask": kept_T})
    assert updates.run(trained, 1, Timer(), lambda: None)["actor/way"] == 1
    scored = updates.scored(batch, trained)
    assert scored.tokens["old_log_probs"].tolist() == [0, -2, -2, 0, 0]
    metrics = health_metrics([], scored)
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(0.5)
    assert metrics["health/entropy"] == pytest.approx(0.5)


def test_scores_from_before_the_update() -> None:
    """With several optimizer steps; the sampler's own say nothing."""
    batch = make_batch()
    batch.tokens["old_log_probs"] = torch.full((5,), -1.75)
    updates = make_updates("actor_rollout_ref.actor.ppo_mini_batch_size=1024")
    assert updates.run(batch, 1, Timer(), lambda: None)["actor/way"] == 0
    assert health_metrics([], updates.scored(batch, batch))["health/mismatch/mean_abs"] == pytest.approx(0.25)
    rollout = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024", "actor_rollout_ref.actor.use_rollout_log_probs=true"
    )
    assert "old_log_probs" not in rollout.scored(batch, batch).tokens
