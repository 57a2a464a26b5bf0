"""Intervals against closed forms, numbers worked out by hand, and cases that can be counted out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from search_r1.evaluation.statistics import Estimate, calibration, estimates


def column(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def one_set(values: np.ndarray, **options: object) -> Estimate:
    by_set, _, _ = estimates({"s": values}, **options)
    return by_set["s"][0]


def test_a_large_sample_has_the_interval_of_the_normal_approximation() -> None:
    values = np.concatenate([np.ones(600), np.zeros(1400)])[:, None]
    found = one_set(values)
    half = 1.959964 * math.sqrt(0.3 * 0.7 / 2000)
    assert found.mean == pytest.approx(0.3) and found.count == 2000
    # 10,000 resamples: a bound's own standard error is about 0.03 half widths; values lie on a grid of 1/2000.
    assert found.low == pytest.approx(0.3 - half, abs=0.1 * half + 1 / 2000)
    assert found.high == pytest.approx(0.3 + half, abs=0.1 * half + 1 / 2000)


def test_two_values_by_hand() -> None:
    """Of 0 and 1 a resample's mean is 0, 1/2 or 1 with chances 1/4, 1/2, 1/4."""
    values = column(0.0, 1.0)
    wide, narrow = one_set(values), one_set(values, level=0.4)
    assert (wide.mean, wide.low, wide.high) == (0.5, 0.0, 1.0)
    assert (narrow.low, narrow.high) == (0.5, 0.5)  # the 30% and 70% quantiles


def test_a_constant_has_no_spread() -> None:
    assert one_set(column(2.0, 2.0, 2.0)) == Estimate(2.0, 2.0, 2.0, 3)


def share(right: int, count: int) -> Estimate:
    """Of a score that is 1 for `right` of `count` questions."""
    return one_set(column(*[1.0] * right, *[0.0] * (count - right)), scores=[0])


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        # z^2 = 3.841459. All right: low = n / (n + z^2) = 20 / 23.841459. None right: high = z^2 / (n + z^2).
        (20, 20, 0.838875, 1.0),
        (0, 20, 0.0, 0.161125),
        # (0.75 + z^2/40 -+ z sqrt(0.75 * 0.25 / 20 + z^2/1600)) / (1 + z^2/20) = (0.846036 -+ 0.212690) / 1.192073
        (15, 20, 0.531299, 0.888138),
        # (0.5 + z^2/4 -+ z sqrt(0.25 / 2 + z^2/16)) / (1 + z^2/2) = (1.460365 -+ 1.184141) / 2.920729
        (1, 2, 0.094531, 0.905469),
        (1, 1, 0.206549, 1.0),  # 1 / 4.841459
    ],
)
def test_a_share_has_the_interval_of_wilson(right: int, count: int, low: float, high: float) -> None:
    found = share(right, count)
    assert (found.mean, found.count, found.interval) == (right / count, count, "wilson")
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-6)


def test_only_scores_of_noughts_and_ones_are_shares() -> None:
    """A score in between has a spread of its own; a count may be 1 by chance, and 2 for the next question."""
    table = np.array([[1.0, 1.0, 1.0], [1.0, 0.5, 1.0], [1.0, 1.0, 1.0]])
    by_set, macro, micro = estimates({"s": table}, scores=[0, 1])
    for found in (by_set["s"], macro, micro):
        assert [estimate.interval for estimate in found] == ["wilson", "bootstrap", "bootstrap"]
    assert by_set["s"][0].low == pytest.approx(3 / 6.841459) and by_set["s"][2].low == 1.0


def test_means_over_sets_put_the_intervals_of_their_shares_together() -> None:
    """low = mean - sqrt(sum((weight * (mean_s - low_s))^2)), by hand from the intervals of 20 of 20 and 1 of 2."""
    values = {"a": column(*[1.0] * 20), "b": column(0.0, 1.0), "none": np.zeros((0, 1))}
    by_set, [macro], [micro] = estimates(values, scores=[0])
    assert math.isnan(by_set["none"][0].mean) and macro.count == micro.count == 22
    assert macro.mean == 0.75 and micro.mean == pytest.approx(21 / 22)
    assert macro.low == pytest.approx(0.75 - 0.5 * math.hypot(0.161125, 0.405469), abs=1e-5)
    assert macro.high == pytest.approx(0.75 + 0.5 * 0.405469, abs=1e-5)
    assert micro.low == pytest.approx(21 / 22 - math.hypot(20 * 0.161125, 2 * 0.405469) / 22, abs=1e-5)
    assert micro.high == pytest.approx(21 / 22 + 2 * 0.405469 / 22, abs=1e-5)
    alone, [same_macro], [same_micro] = estimates({"a": values["a"]}, scores=[0])
    assert alone["a"][0] == same_macro == same_micro


def test_macro_counts_sets_and_micro_counts_questions() -> None:
    values = {"small": column(1.0, 1.0), "large": column(*[0.0] * 6)}
    _, macro, micro = estimates(values)
    assert macro == [Estimate(0.5, 0.5, 0.5, 8)]
    assert micro == [Estimate(0.25, 0.25, 0.25, 8)]  # within their sets: no resample has more of the small one


def test_the_macro_interval_has_the_variance_of_its_parts() -> None:
    values = {"a": np.tile(column(0.0, 1.0), (200, 1)), "b": np.tile(column(0.0, 0.0, 0.0, 1.0), (300, 1))}
    _, [macro], _ = estimates(values)
    half = 1.959964 * 0.5 * math.sqrt(0.25 / 400 + 0.1875 / 1200)
    assert macro.mean == pytest.approx(0.375)
    assert macro.high - macro.low == pytest.approx(2 * half, rel=0.06)


def test_where_a_metric_does_not_apply_it_counts_nowhere() -> None:
    table = np.array([[1.0, math.nan], [0.0, 0.5], [1.0, 0.5]])
    by_set, macro, micro = estimates({"s": table, "none": np.array([[1.0, math.nan]])})
    assert by_set["s"][1] == Estimate(0.5, 0.5, 0.5, 2)
    assert by_set["none"][1].count == 0 and math.isnan(by_set["none"][1].mean)
    assert macro[1].mean == 0.5 and macro[1].count == 2
    assert macro[0].mean == pytest.approx((2 / 3 + 1) / 2) and micro[0].mean == pytest.approx(3 / 4)


def test_a_set_of_which_nothing_was_finished() -> None:
    by_set, macro, _ = estimates({"s": column(1.0), "gone": np.zeros((0, 1))})
    assert by_set["gone"][0].count == 0 and macro[0].mean == 1.0


def test_the_seed_and_the_set_alone_make_the_interval() -> None:
    values = np.random.default_rng(0).random((50, 2))
    alone, _, _ = estimates({"s": values})
    together, _, _ = estimates({"t": values, "s": values})
    assert alone["s"] == together["s"] != together["t"]
    assert estimates({"s": values}, seed=1)[0] != alone


def test_calibration_by_hand() -> None:
    """250 answers, in two bins of 100 and 150 by confidence, whatever their order."""
    low, high = [0.2] * 100, [0.8] * 150
    right = [1.0] * 30 + [0.0] * 70 + [1.0] * 90 + [0.0] * 60  # shares .3 and .6
    order = np.random.default_rng(0).permutation(250)
    found = calibration(np.array(low + high)[order].tolist(), np.array(right)[order].tolist())
    assert (found["answers"], found["right"]) == (250, pytest.approx(120 / 250))
    assert found["confidence"] == pytest.approx((20 + 120) / 250)
    assert found["error"] == pytest.approx(math.sqrt((100 * 0.1**2 + 150 * 0.2**2) / 250))
    assert found["error_as_published"] == pytest.approx(math.sqrt(100 * 0.1**2 / 250))
    assert calibration([0.9, 0.5], [1.0, 0.0])["error"] == pytest.approx(0.2)
    assert calibration([1.0], [1.0]) == {
        "answers": 1,
        "confidence": 1.0,
        "right": 1.0,
        "error": 0.0,
        "error_as_published": None,
    }
