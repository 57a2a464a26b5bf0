"""The sampler's log-probs of its own tokens are the trainer's, right after a weight sync and after further updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verl.config import load_config
from verl.protocol import Source, TrainBatch


@pytest.fixture(scope="module")
def trainer(ray_session: None, tinywiki: Path, policy: Path, tinywiki_url: str, tmp_path_factory) -> Iterator:
    from verl.trainer.rl_trainer import RLTrainer

    settings = {
        "data.train_files": tinywiki / "train.parquet",
        "data.val_files": tinywiki / "validation.parquet",
        "data.train_batch_size": 8,
        "actor_rollout_ref.model.path": policy,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.rollout.n_agent": 4,
        "actor_rollout_ref.rollout.temperature": 0.7,
        "retriever.url": tinywiki_url,
        "trainer.default_local_dir": tmp_path_factory.mktemp("sync"),
        "trainer.logger": "[]",
    }
    trainer = RLTrainer(load_config("tinywiki", [f"{key}={value}" for key, value in settings.items()]), "cpu")
    yield trainer
    trainer.shutdown()


def difference(trainer, version: int) -> torch.Tensor:
    """|sampler - trainer| of fresh trajectories' log-probs, one per policy token."""
    trajectories = trainer.run.rollouts.collect(trainer.run.prompts.train.next(8), 4, version)
    assert {trajectory.weight_version for trajectory in trajectories} == {version}
    for trajectory in trajectories:
        trajectory.reward = 0.0
        assert trajectory.segments[0].source is Source.PROMPT
    batch = TrainBatch.from_trajectories(trajectories)
    trained_T = trainer.run.actor.log_probs(batch)["log_prob"]
    return (batch.tokens["rollout_log_probs"] - trained_T)[batch.tokens["loss_mask"]].abs()


def assert_same(difference_T: torch.Tensor) -> None:
    assert len(difference_T) > 200
    assert difference_T.max() < 2e-5 and difference_T.mean() < 2e-6


def test_log_probs_agree_after_a_sync_and_after_five_updates(trainer) -> None:
    assert_same(difference(trainer, 0))
    for step in range(1, 6):
        trainer.train_step(step)
    assert_same(difference(trainer, 5))


def test_a_stale_sampler_would_be_noticed(trainer) -> None:
    """The same comparison, with an update that the sampler has not been given."""
    trajectories = trainer.run.rollouts.collect(trainer.run.prompts.train.next(8), 4, 6)
    for index, trajectory in enumerate(trajectories):
        trajectory.reward = float(index % 2)
    batch = TrainBatch.from_trajectories(trajectories)
    batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
    sign_T = (batch.row_of_token_T % 2 * 2 - 1).float()
    batch.tokens["advantages"] = sign_T * batch.tokens["loss_mask"]
    trainer.run.actor.update(batch)
    trained_T = trainer.run.actor.log_probs(batch)["log_prob"]
    stale_T = (batch.tokens["rollout_log_probs"] - trained_T)[batch.tokens["loss_mask"]].abs()
    with pytest.raises(AssertionError):
        assert_same(stale_T)
