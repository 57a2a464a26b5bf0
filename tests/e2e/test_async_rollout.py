"""Asynchronous RL with the real parts: which weights sampled what, and a rollback during a collection."""

from __future__ import annotations

from pathlib import Path

import pytest
from async_runs import BOUNDED, ONE_STEP_OFF, PLAIN, STEPS, Command, assert_each_prompt_once, versions_of
from e2e_world import metrics_by_step, run_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("ray_session")]


def test_one_step_off(async_command: Command, tmp_path: Path) -> None:
    """Step n is sampled with version n - 2, the first with 0; a validation has the weights of its own step."""
    shown = ("+trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=2", "trainer.logger=[]")
    assert run_here(*async_command(tmp_path, *ONE_STEP_OFF, *shown)) == 0
    assert [versions_of(tmp_path, step) for step in range(1, STEPS + 1)] == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert [versions_of(tmp_path, step, "val") for step in (2, 4, 6)] == [{2}, {4}, {6}]
    metrics = metrics_by_step(tmp_path)
    assert [metrics[step]["rollout/staleness/max"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1, 1, 1]
    for step in range(1, STEPS + 1):
        row = metrics[step]
        assert row["rollout/idle_s"] >= 0 and row["rollout/collect_s"] > 0 and row["timing_s/gen"] > 0
        assert row["rollout/num_engines"] == 1 and row["memory_gib/sample/actor"] > 0.1
    # The sampler's and the trainer's log-probs differ by rounding in the first step, and by an update later.
    differing = [metrics[step]["rollout_correction/log_ratio_abs_mean"] for step in range(1, STEPS + 1)]
    assert differing[0] < 1e-4 < min(differing[2:])
    assert (tmp_path / "actor" / "global_step_6").is_dir() and (tmp_path / "report.md").is_file()
    assert_each_prompt_once(tmp_path)


def test_a_rollback_throws_away_what_the_collapsed_weights_sampled(
    async_command: Command, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions 3 and 4 have collapsed. The first batch of one of them sets the alarm off, while others are sampled;
    the run goes back to the checkpoint before that version, and no other batch of a collapsed version is trained.
    """
    caplog.set_level("INFO")
    reward = ("reward.function=tests.helpers.collapsing_reward.CollapsingReward", "reward.kwargs={collapsed: [3, 4]}")
    settings = ("action=rollback", "min_reward=0.25", "patience=1", "max_rollbacks=9")
    guard = [f"trainer.collapse_guard.{setting}" for setting in settings]
    assert run_here(*async_command(tmp_path, *BOUNDED, *PLAIN, *reward, *guard, "trainer.save_freq=1")) == 0
    said = caplog.text
    assert said.count("Going back to step") == 1, said[-4000:]
    versions = {step: versions_of(tmp_path, step) for step in range(1, STEPS + 1)}
    [(step, (version,))] = [(step, found) for step, found in versions.items() if found & {3, 4}]
    assert f"Going back to step {version - 1} with half the learning rate" in said
    assert metrics_by_step(tmp_path)[step]["critic/score/mean"] == 0
    assert step == STEPS or versions[step + 1] == {step}, "sampled anew, with the weights that were put back"
    assert_each_prompt_once(tmp_path)
