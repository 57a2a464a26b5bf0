"""Asynchronous RL with the real parts: which weights sampled what, and a rollback during a collection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from async_runs import BOUNDED, ONE_STEP_OFF, PLAIN, STEPS, assert_each_prompt_once, versions_of
from e2e_world import metrics_by_step, run, run_and_listen, small_run

pytestmark = pytest.mark.slow  # two runs of six steps
Command = Callable[..., tuple[str, ...]]


@pytest.fixture
def command(tinywiki: Path, policy: Path, tinywiki_url: str) -> Command:
    """Of a run of STEPS steps in a folder."""

    def make(folder: Path, *overrides: str) -> tuple[str, ...]:
        return small_run(tinywiki, policy, tinywiki_url, folder, f"trainer.total_training_steps={STEPS}", *overrides)

    return make


def test_one_step_off(command: Command, tmp_path: Path) -> None:
    """Step n is sampled with version n - 2, the first with 0; a validation has the weights of its own step."""
    shown = ("+trainer.val_before_train=false", "trainer.test_freq=2", "trainer.save_freq=2", "trainer.logger=[]")
    run(*command(tmp_path, *ONE_STEP_OFF, *shown))
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


def test_a_rollback_throws_away_what_the_collapsed_weights_sampled(command: Command, tmp_path: Path) -> None:
    """The KL to the anchor, which does not move here, is 0 in the first step and then an alarm."""
    guard = "trainer.collapse_guard"
    alarm = (f"{guard}.action=rollback", f"{guard}.max_kl=1e-7", f"{guard}.patience=1", f"{guard}.max_rollbacks=9")
    still = ("algorithm.ref_policy_ema_tau=1.0", "trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=1.0e-3")
    done = run_and_listen(*command(tmp_path, *BOUNDED, *PLAIN, *alarm, *still))
    assert done.stderr.count("Going back to step") >= 2, done.stderr[-4000:]
    metrics = metrics_by_step(tmp_path)
    first = min(step for step in metrics if metrics[step]["actor/kl_loss"] > 1e-7)
    assert metrics[first + 1]["rollout/staleness/max"] == 0, "sampled anew, with the weights that were put back"
    assert versions_of(tmp_path, first + 1) == {first}
    assert_each_prompt_once(tmp_path)
