"""The guard on sequences of metrics, each with the step at which it must speak."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

import pytest

from verl.config.sections.trainer import CollapseGuardConfig
from verl.trainer.collapse_guard import Alarm, CollapseGuard, good_checkpoint

KL = "actor/kl_loss"
SCORE = "critic/score/mean"
GRAD = "actor/grad_norm"
ZERO_VARIANCE = "health/zero_variance_groups"
EQUAL = "health/equal_rewards"
ZERO_ADVANTAGES = "health/zero_advantages"

# setting, threshold, metric, a value that is bad, and one just within
CASES = [
    ("max_invalid_action_ratio", 0.5, "health/invalid_action_ratio", 0.51, 0.5),
    ("max_repetition", 0.5, "health/repetition", 0.51, 0.5),
    ("max_empty_think_ratio", 0.5, "health/empty_think_ratio", 0.51, 0.5),
    ("max_zero_variance_groups", 0.5, ZERO_VARIANCE, 0.51, 0.5),
    ("min_reward", 0.1, SCORE, 0.09, 0.1),
    ("min_entropy", 0.1, "health/entropy", 0.09, 0.1),
    ("min_entropy", 0.1, "actor/entropy_loss", 0.09, 0.1),
    ("max_entropy", 2.0, "health/entropy", 2.1, 2.0),
    ("max_kl", 0.2, KL, 0.21, 0.2),
    ("max_kl", 0.2, "critic/kl", 0.21, 0.2),  # of a KL in the reward
    ("max_grad_norm", 10.0, GRAD, 10.1, 10.0),
    ("max_mismatch", 0.05, "health/mismatch/mean_abs", 0.06, 0.05),
]


def guard(**settings: object) -> CollapseGuard:
    return CollapseGuard(CollapseGuardConfig(**({"action": "stop", "patience": 3} | settings)))  # type: ignore[arg-type]


def alarms(watcher: CollapseGuard, metric: str, values: Iterable[float | None]) -> dict[int, Alarm]:
    """By step, from 1, what a metric of these values gives; None is a step without the metric."""
    observed = {
        step: watcher.observe({} if value is None else {metric: value}, step) for step, value in enumerate(values, 1)
    }
    return {step: alarm for step, alarm in observed.items() if alarm is not None}


@pytest.mark.parametrize(("setting", "threshold", "metric", "bad", "good"), CASES)
def test_each_threshold_watches_its_metric(
    setting: str, threshold: float, metric: str, bad: float, good: float
) -> None:
    watcher = guard(**{setting: threshold})
    assert alarms(watcher, metric, [good] * 9) == {}
    [(step, alarm)] = alarms(watcher, metric, [bad] * 3).items()
    assert (step, alarm.action) == (3, "stop")
    assert (alarm.name, alarm.metric, alarm.value, alarm.threshold) == (setting, metric, bad, threshold)
    assert alarm.steps == 3
    assert setting in alarm.message and metric in alarm.message and "What to do: " in alarm.message


def test_every_threshold_of_the_config_is_tested() -> None:
    thresholds = {field.name for field in dataclasses.fields(CollapseGuardConfig) if field.name.startswith("m")}
    assert thresholds == {setting for setting, *_ in CASES} | {"max_score_drop", "max_rollbacks"}


@pytest.mark.parametrize(
    ("settings", "values", "steps"),
    [
        ({"max_kl": 0.2}, [0.3] * 30, [3, 6, 12, 24]),  # after its patience; again ever more rarely
        ({"max_kl": 0.2}, [0.3, 0.3, 0.1, 0.3, 0.3, 0.3], [6]),  # a good step starts the count anew
        ({"max_kl": 0.2}, [0.3, None, 0.3, None, 0.3], [5]),  # one without the metric neither counts nor resets
        ({"max_kl": None}, [math.nan, 1e9] * 9, []),  # what is not watched may be anything
        ({"action": "off", "max_kl": 0.2}, [math.nan] * 9, []),
    ],
)
def test_the_steps_of_alarms(settings: dict[str, object], values: list[float | None], steps: list[int]) -> None:
    assert list(alarms(guard(**settings), KL, values)) == steps


def test_the_sampled_entropy_is_preferred_to_the_updates() -> None:
    watcher = guard(min_entropy=0.1, patience=1)
    assert watcher.observe({"health/entropy": 0.5, "actor/entropy_loss": 0.0}, 1) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("setting", "threshold", "metric"), [case[:3] for case in CASES])
def test_not_a_finite_number_is_an_alarm_at_once(setting: str, threshold: float, metric: str, value: float) -> None:
    [(step, alarm)] = alarms(guard(**{setting: threshold}), metric, [value]).items()
    assert (step, alarm.steps, alarm.metric) == (1, 1, metric)
    assert "finite" in alarm.message


def test_a_gradient_of_nan_is_an_alarm_with_the_defaults() -> None:
    alarm = CollapseGuard(CollapseGuardConfig(action="stop")).observe({ZERO_VARIANCE: 1.0, GRAD: math.nan}, 4)
    assert alarm is not None and alarm.metric == GRAD


@pytest.mark.parametrize(
    "step",
    [
        {ZERO_VARIANCE: 1.0},
        {GRAD: 0.0},
        {ZERO_VARIANCE: 0.5, GRAD: 0.0},
        {ZERO_VARIANCE: 1.0, GRAD: 0.7},
        {EQUAL: 1.0, GRAD: 0.7},
        {EQUAL: 0.0, ZERO_VARIANCE: 0.5, ZERO_ADVANTAGES: 1.0, GRAD: 0.7},
    ],
)
def test_a_dead_run_has_patience_of_its_own(step: dict[str, float]) -> None:
    watcher = guard(dead_run_steps=4, patience=1)
    first, second, third, fourth = (watcher.observe(step, number) for number in range(1, 5))
    assert (first, second, third) == (None, None, None)
    assert fourth is not None and fourth.name == "dead_run_steps" and fourth.value == step[fourth.metric]


def test_a_dead_run_is_told_what_it_looks_like() -> None:
    watcher = guard(dead_run_steps=2)
    step = {EQUAL: 1.0, ZERO_ADVANTAGES: 1.0, ZERO_VARIANCE: 1.0, GRAD: 0.7, SCORE: 0.8}
    assert watcher.observe(step, 7) is None
    alarm = watcher.observe(step, 8)
    assert alarm is not None
    assert "every trajectory had the same reward, 0.8" in alarm.message
    assert "every advantage was 0" in alarm.message
    assert "no group had two different rewards" in alarm.message
    assert "for 2 steps since step 7" in alarm.message
    assert "gradient" not in alarm.message.split("What to do")[0], "it was not 0: a KL or an entropy bonus has one"


def test_the_counts_are_metrics() -> None:
    watcher = guard(dead_run_steps=2, max_kl=0.2, max_repetition=None)
    told = []
    for step, kl in enumerate([0.1, 0.3, 0.3, 0.3, 0.1], 1):
        watcher.observe({KL: kl, GRAD: 0.0}, step)
        told.append(watcher.metrics())
    assert [metrics["health/guard/max_kl"] for metrics in told] == [0, 1, 2, 3, 0]
    assert [metrics["health/guard/dead_run_steps"] for metrics in told] == [1, 2, 3, 4, 5]
    # the dead run after 2 and 4 steps, the KL after its 3 steps of patience, in step 4 too
    assert [metrics["health/guard/alarm"] for metrics in told] == [0, 1, 0, 1, 0]
    assert "health/guard/max_repetition" not in told[0]
    assert guard(action="off").metrics() == {}


def test_a_limit_without_its_metric_does_not_look_watched() -> None:
    watcher = guard(max_empty_think_ratio=0.5, max_kl=0.2)
    watcher.observe({KL: 0.1}, 1)
    assert watcher.metrics() == {"health/guard/alarm": 0, "health/guard/max_kl": 0}
    assert watcher.not_seen() == {"max_empty_think_ratio": "health/empty_think_ratio"}  # and none of the defaults
    watcher.observe({"health/empty_think_ratio": 0.6}, 2)
    watcher.observe({}, 3)  # a step without it does not make it unwatched
    assert watcher.metrics()["health/guard/max_empty_think_ratio"] == 1 and watcher.not_seen() == {}
    assert guard(action="off", max_kl=0.2).not_seen() == {}


def test_the_default_is_to_warn() -> None:
    watcher = CollapseGuard(CollapseGuardConfig())
    [(step, alarm)] = alarms(watcher, EQUAL, [1.0] * 30).items()
    assert (step, alarm.action) == (20, "warn")


def test_one_group_to_learn_from_makes_a_run_alive() -> None:
    watcher = guard(dead_run_steps=2)
    values = [1.0, 0.99, 1.0, 0.99, 1.0]
    assert all(watcher.observe({ZERO_VARIANCE: v, GRAD: 0.1}, step) is None for step, v in enumerate(values, 1))


def test_a_score_drop_is_measured_from_the_best_average_of_ten_steps() -> None:
    # Ten scores of 0.6, then ten of 0.8: the best average is 0.8, so below 0.5 is too low. Steps 24 and 25 are two in
    # a row. The average falls with the score, the best stays.
    watcher = guard(max_score_drop=0.3, patience=2)
    found = alarms(watcher, SCORE, [0.6] * 10 + [0.8] * 10 + [0.51, 0.49, 0.51, 0.49, 0.49])
    assert list(found) == [25]
    assert (found[25].name, found[25].value) == ("max_score_drop", 0.49)
    assert found[25].threshold == pytest.approx(0.5)


def test_a_score_drop_needs_ten_scores() -> None:
    # Step 9 is as low as step 10, where the average is (8 + 0 + 0) / 10 = 0.8 and the threshold 0.5.
    found = alarms(guard(max_score_drop=0.3, patience=1), SCORE, [1.0] * 8 + [0.0] * 2)
    assert {step: alarm.threshold for step, alarm in found.items()} == {10: pytest.approx(0.5)}


def test_a_score_of_nan_does_not_enter_the_average() -> None:
    found = alarms(guard(max_score_drop=0.3, patience=1), SCORE, [0.8] * 5 + [math.nan] + [0.8] * 5 + [0.4])
    assert list(found) == [6, 12]
    assert found[12].threshold == pytest.approx(0.5)


def test_of_several_alarms_the_oldest_is_given_and_the_others_named() -> None:
    # The KL is too large from step 2 on, the gradient from step 3 on, where NaN makes it an alarm of step 4 as well.
    watcher = guard(max_grad_norm=1.0, max_kl=0.2)
    steps = [{KL: 0.1, GRAD: 0.5}, {KL: 0.3, GRAD: 0.5}, {KL: 0.3, GRAD: 2.0}, {KL: 0.3, GRAD: math.nan}]
    *quiet, alarm = (watcher.observe(metrics, step) for step, metrics in enumerate(steps, 1))
    assert quiet == [None] * 3
    assert alarm is not None and alarm.name == "max_kl" and "Also: max_grad_norm, dead_run_steps." in alarm.message


def test_the_defaults_watch_a_useful_few() -> None:
    watcher = CollapseGuard(CollapseGuardConfig(action="warn"))
    assert list(alarms(watcher, "health/invalid_action_ratio", [1.0] * 5)) == [5]
    assert list(alarms(watcher, "health/repetition", [0.95] * 5)) == [5]
    assert list(alarms(watcher, ZERO_VARIANCE, [1.0] * 20)) == [20]
    assert alarms(watcher, KL, [1e9] * 20) == {}


def test_a_rollback_forgets_the_past_and_the_last_one_is_followed_by_a_stop() -> None:
    watcher = guard(action="rollback", max_rollbacks=2, max_kl=0.2)
    actions = []
    for _ in range(3):
        found = alarms(watcher, KL, [0.3] * 3)
        assert list(found) == [3]
        actions.append(found[3].action)
        watcher.reset()
        assert alarms(watcher, KL, [0.3] * 2) == {}
        assert alarms(watcher, KL, [0.1]) == {}
    assert actions == ["rollback", "rollback", "stop"]


def test_a_rollback_forgets_the_best_score() -> None:
    watcher = guard(action="rollback", max_score_drop=0.3, patience=1)
    assert alarms(watcher, SCORE, [0.9] * 10) == {}
    watcher.reset()
    assert alarms(watcher, SCORE, [0.1] * 10) == {}


def test_the_first_bad_weights_are_those_that_the_first_bad_step_sampled_with() -> None:
    # Bad from step 4 on: it sampled with the weights saved at step 3, so 2 is the newest checkpoint to trust.
    [alarm] = alarms(guard(max_kl=0.2), KL, [0.1, 0.1, 0.1, 0.3, 0.3, 0.3]).values()
    assert alarm.first_bad_step == 3
    assert "since step 4" in alarm.message
    assert good_checkpoint([1, 2, 3, 4], alarm.first_bad_step) == 2


def test_weights_that_sampled_ahead_are_older_by_the_staleness() -> None:
    """Bad from step 4 on, which version 1 has sampled. What the first bad step had counts, not the latest."""
    watcher = guard(max_kl=0.2)
    for step, (kl, staleness) in enumerate([(0.1, 0.0), (0.1, 1.0), (0.1, 2.0), (0.3, 2.0), (0.3, 1.0)], start=1):
        assert watcher.observe({KL: kl, "rollout/staleness/max": staleness}, step) is None
    resumed = guard(max_kl=0.2)
    resumed.load_state_dict(json.loads(json.dumps(watcher.state_dict())))
    alarm = resumed.observe({KL: 0.3, "rollout/staleness/max": 0.0}, 6)
    assert alarm is not None and alarm.first_bad_step == 1


@pytest.mark.parametrize(
    ("saved", "first_bad_step", "good"),
    [([10, 20, 30], 25, 20), ([30, 10, 20], 25, 20), ([10, 20, 30], 20, 10), ([10], 10, None), ([], 5, None)],
)
def test_the_good_checkpoint_is_the_newest_from_before(saved: list[int], first_bad_step: int, good: int | None) -> None:
    assert good_checkpoint(saved, first_bad_step) == good
