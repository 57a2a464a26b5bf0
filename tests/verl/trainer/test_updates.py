"""What an update finds of the policy reaches the health metrics, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_config import run_config

from verl.protocol import Prompt, Segment, Source, TrainBatch, Trajectory
from verl.tracking.timing import Timer
from verl.trainer.collection import Collected
from verl.trainer.health import health_metrics
from verl.trainer.policy_scores import PolicyScores
from verl.trainer.stored_values import token_values
from verl.trainer.updates import Updates


class Workers:
    """Stands for the actor's workers: each token's log-prob is -2, its entropy 0.5, where the loss mask is."""

    def update(self, batch: TrainBatch, beside: object) -> dict[str, float]:
        return {"actor/way": 0.0}

    def update_and_score(
        self, batch: TrainBatch, beside: object, names: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        mask_T = batch.tokens["loss_mask"].float()
        found = {"log_prob": -2 * mask_T, "entropy": 0.5 * mask_T, "kl": 0.25 * mask_T}
        return {"actor/way": 1.0}, {name: found[name] for name in names}


def make_batch() -> TrainBatch:
    """Two rows; tokens 1 and 2 of the first and 1 of the second are the policy's, sampled at -1.5 nats."""
    mask_T = torch.tensor([False, True, True, False, True])
    tokens = {"ids": torch.arange(5), "loss_mask": mask_T, "rollout_log_probs": torch.full((5,), -1.5)}
    return TrainBatch(torch.tensor([3, 2]), tokens)


def make_updates(*overrides: str) -> Updates:
    required = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m"]
    group = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=2"]
    workers: Any = Workers()
    return Updates(run_config([*required, *group, *overrides]), workers, None)


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
    scores = updates.scores(batch, trained)
    assert scores.log_prob_T is not None and scores.log_prob_T.tolist() == [0, -2, -2, 0, 0]
    metrics = health_metrics([], batch, scores)
    assert metrics["health/mismatch/mean_abs"] == pytest.approx(0.5)
    assert metrics["health/entropy"] == pytest.approx(0.5)


def test_scores_from_before_the_update() -> None:
    """With several optimizer steps; the sampler's own say nothing."""
    batch = make_batch()
    batch.tokens["old_log_probs"] = torch.full((5,), -1.75)
    updates = make_updates("actor_rollout_ref.actor.ppo_mini_batch_size=1024")
    assert updates.run(batch, 1, Timer(), lambda: None)["actor/way"] == 0
    assert health_metrics([], batch, updates.scores(batch, batch))["health/mismatch/mean_abs"] == pytest.approx(0.25)
    rollout = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=1024", "actor_rollout_ref.actor.use_rollout_log_probs=true"
    )
    assert rollout.scores(batch, batch).log_prob_T is None
    assert not [name for name in health_metrics([], batch, rollout.scores(batch, batch)) if "mismatch" in name]


def sampled(group: str) -> Trajectory:
    ids = (1, 2, 3) if group == "a" else (1, 2)
    policy = Segment(Source.POLICY, ids[1:], (-1.5,) * (len(ids) - 1))
    return Trajectory(group, Prompt((1,), "d", {}), [Segment(Source.PROMPT, (1,)), policy], reward=1.0)


@pytest.mark.parametrize("on", [True, False])
def test_what_is_stored_of_each_token(on: bool) -> None:
    """One failed and was not trained on; the second row of the batch was left out of the losses."""
    updates = make_updates(
        "actor_rollout_ref.actor.ppo_mini_batch_size=2048",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"trainer.save_token_values={str(on).lower()}",
    )
    failed, first, second = Trajectory("c", Prompt((1,), "d", {})), sampled("a"), sampled("b")
    batch = make_batch()
    batch.tokens["advantages"] = torch.tensor([0, 0.5, 0.5, 0, -0.5])
    trained = replace(
        batch, tokens=batch.tokens | {"loss_mask": batch.tokens["loss_mask"] & (batch.row_of_token_T == 0)}
    )
    updates.run(trained, 1, Timer(), lambda: None)
    collected = Collected([failed, second, first], [first, second], batch)
    values = token_values(collected, trained, updates.scores(batch, trained))
    assert list(values.rows) == [2, 1] and values.lengths_B.tolist() == [3, 2]
    found = {name: value_T[known_T].tolist() for name, (value_T, known_T) in values.columns.items()}
    assert found == {"advantages": [0.5, 0.5, -0.5], "old_log_probs": [-2, -2]} | ({"kl": [0.25, 0.25]} if on else {})


def test_a_kl_in_the_reward_is_of_all_tokens() -> None:
    """It was computed before anything was left out of the losses."""
    batch = make_batch()
    batch.tokens |= {"advantages": torch.zeros(5), "kl": torch.tensor([0.0, 1, 2, 0, 3])}
    batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    trained = replace(batch, tokens=batch.tokens | {"loss_mask": torch.zeros(5, dtype=torch.bool)})
    first, second = sampled("a"), sampled("b")
    values = token_values(Collected([first, second], [first, second], batch), trained, PolicyScores.of(batch))
    kl_T, known_T = values.columns["kl"]
    assert kl_T[known_T].tolist() == [1, 2, 3]
