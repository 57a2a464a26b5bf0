"""What a run does about an alarm: the checkpoint named, the weights put back, the learning rate halved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl.config.collapse_guard import CollapseGuardConfig
from verl.errors import TrainingCollapsed
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.recovery import Recovery

RUN = Path("run")


class Role:
    """Writes down what the trainer asks of an actor or a critic."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, *args, *options.values()))


def recovery(action: str, **settings: Any) -> tuple[Recovery, Role, Role]:
    actor, critic = Role(), Role()
    checkpoints = Checkpoints(RUN, actor, critic, with_anchor=True)  # type: ignore[arg-type]
    config = CollapseGuardConfig(action=action, patience=2, max_repetition=0.5, **settings)  # type: ignore[arg-type]
    return Recovery(config, checkpoints), actor, critic


GOOD, BAD = {"health/repetition": 0.1}, {"health/repetition": 0.9}


def test_warn_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    guard, actor, _ = recovery("warn")
    assert [guard.watch(BAD, step) for step in (1, 2)] == [None, None]
    assert "step 2" in caplog.text and "max_repetition" in caplog.text and not actor.calls


def test_stop_names_the_last_good_checkpoint() -> None:
    guard, _, _ = recovery("stop")
    for step, metrics in enumerate([GOOD, GOOD, GOOD, GOOD, BAD], start=1):
        if step in (2, 4):
            guard.checkpoints.save(step)
        assert guard.watch(metrics, step) is None
    guard.checkpoints.save(5)
    # Step 5's metrics are those of the weights of step 4, so step 2 is the last good one.
    with pytest.raises(TrainingCollapsed, match=r"step 6: max_repetition.*run/actor/global_step_2\."):
        guard.watch(BAD, 6)


def test_stop_without_a_checkpoint_says_so() -> None:
    guard, _, _ = recovery("stop")
    guard.watch(BAD, 1)
    with pytest.raises(TrainingCollapsed, match="set trainer.save_freq"):
        guard.watch(BAD, 2)


def test_rollback_puts_every_role_back_and_halves_the_learning_rate() -> None:
    guard, actor, critic = recovery("rollback")
    guard.checkpoints.save(2)
    guard.checkpoints.save(5)
    actor.calls.clear()
    critic.calls.clear()
    assert guard.watch(BAD, 6) is None
    assert guard.watch(BAD, 7) == 2, "step 5 has the weights that step 6 sampled with"
    folder = "global_step_2"
    assert actor.calls == [
        ("load", RUN / "actor" / folder),
        ("load", RUN / "ref" / folder, "anchor"),
        ("scale_lr", 0.5),
    ]
    assert critic.calls == [("load", RUN / "critic" / folder), ("scale_lr", 0.5)]
    assert guard.checkpoints.steps == [2], "what was saved after the good step is no longer one to go back to"


def test_after_enough_rollbacks_the_run_ends() -> None:
    guard, _, _ = recovery("rollback", max_rollbacks=1)
    guard.checkpoints.save(1)
    assert [guard.watch(BAD, step) for step in (3, 4)] == [None, 1]
    guard.watch(BAD, 5)
    with pytest.raises(TrainingCollapsed):
        guard.watch(BAD, 6)
