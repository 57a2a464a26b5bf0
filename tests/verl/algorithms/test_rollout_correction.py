"""Weights, rejections and metrics of the sampler's mismatch: by hand, and what must not change them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.rollout_correction import Correction, CorrectionSettings, rollout_correction

NAN = math.nan
# Policy tokens' ratios: row 0: 4, 1/2 (product 2, geometric mean sqrt 2); row 1: 1.2, 1.2, 1.2 (1.728, 1.2);
# row 2: 3 (3, 3); row 3 has no policy token. Masked tokens hold NaN.
ROW_T = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3])
MASK_T = torch.tensor([False, True, True, True, True, False, True, True, False])
RATIO_T = torch.tensor([NAN, 4.0, 0.5, 1.2, 1.2, NAN, 1.2, 3.0, NAN], dtype=torch.float64)
ROLLOUT_T = torch.tensor([NAN, -2.0, -1.0, -0.5, -3.0, 0.0, -0.7, -5.0, -1.0], dtype=torch.float64)
LOG_PROB_T = ROLLOUT_T + RATIO_T.log()


def correct(settings: CorrectionSettings) -> Correction:
    return rollout_correction(LOG_PROB_T, ROLLOUT_T, MASK_T, ROW_T, 4, settings)


def kept(correction: Correction) -> list[int]:
    return correction.keep_T.nonzero().flatten().tolist()


def test_without_correction_nothing_changes_but_the_mismatch_is_measured() -> None:
    weight_T, keep_T, metrics = correct(CorrectionSettings())
    assert weight_T.tolist() == [1.0] * 9
    assert torch.equal(keep_T, MASK_T)
    log4, log2, log3, log12 = math.log(4), math.log(2), math.log(3), math.log(1.2)
    # k3 = ratio - 1 - log ratio: its mean over tokens drawn by the sampler estimates KL(sampler || trainer)
    k3 = ((4 - 1 - log4) + (0.5 - 1 + log2) + 3 * (1.2 - 1 - log12) + (3 - 1 - log3)) / 6
    assert metrics == pytest.approx(
        {
            "log_ratio_abs_mean": (log4 + log2 + 3 * log12 + log3) / 6,
            "log_ratio_abs_max": log4,
            "k3_kl": k3,
            "rejected_share": 0.0,
            "effective_sample_share": 1.0,
            "capped_share": 0.0,
        }
    )


def test_token_weights_by_hand() -> None:
    weight_T, keep_T, metrics = correct(CorrectionSettings(importance="token", importance_cap=2.0))
    # 4 and 3 are capped at 2
    expected = torch.tensor([1, 2.0, 0.5, 1.2, 1.2, 1, 1.2, 2.0, 1], dtype=torch.float64)
    torch.testing.assert_close(weight_T, expected)
    assert torch.equal(keep_T, MASK_T)
    # sum 8.1, sum of squares 4 + 0.25 + 3 * 1.44 + 4 = 12.57
    assert metrics["effective_sample_share"] == pytest.approx(8.1**2 / (6 * 12.57))
    assert metrics["capped_share"] == pytest.approx(2 / 6)


def test_sequence_weights_by_hand() -> None:
    weight_T, _, metrics = correct(CorrectionSettings(importance="sequence", importance_cap=2.5))
    # products of ratios 2, 1.728, 3 (capped at 2.5) at every policy token of the row
    expected = torch.tensor([1, 2.0, 2.0, 1.728, 1.728, 1, 1.728, 2.5, 1], dtype=torch.float64)
    torch.testing.assert_close(weight_T, expected)
    assert metrics["capped_share"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("reject", "low", "high", "indices"),
    [
        ("token", 0.4, 2.0, [2, 3, 4, 6]),  # 4 and 3 are too large
        ("token", 0.6, 5.0, [1, 3, 4, 6, 7]),  # 1/2 is too small
        ("sequence", 0.5, 1.9, [3, 4, 6]),  # 2 and 3 are too large, 1.728 is not
        ("geometric", 0.5, 1.45, [1, 2, 3, 4, 6]),  # sqrt 2 = 1.414 and 1.2 pass, 3 does not
        ("geometric", 0.5, 1.3, [3, 4, 6]),
    ],
)
def test_rejection_by_hand(reject: str, low: float, high: float, indices: list[int]) -> None:
    correction = correct(CorrectionSettings(reject=reject, reject_low=low, reject_high=high))  # type: ignore[arg-type]
    assert kept(correction) == indices
    assert correction.metrics["rejected_share"] == pytest.approx(1 - len(indices) / 6)
    assert correction.weight_T.tolist() == [1.0] * 9


def test_weights_and_rejection_together() -> None:
    settings = CorrectionSettings(importance="sequence", importance_cap=1.9, reject="token", reject_low=0.4)
    correction = correct(settings)
    # tokens 1 and 7 are rejected: weight 1, and no part in the weights' metrics. Token 2 keeps its row's whole
    # product 2, capped at 1.9
    expected = torch.tensor([1, 1, 1.9, 1.728, 1.728, 1, 1.728, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(correction.weight_T, expected)
    assert kept(correction) == [2, 3, 4, 6]
    total, squares = 1.9 + 3 * 1.728, 1.9**2 + 3 * 1.728**2
    assert correction.metrics["effective_sample_share"] == pytest.approx(total**2 / (4 * squares))
    assert correction.metrics["capped_share"] == pytest.approx(1 / 4)


def test_bounds_belong_to_what_passes() -> None:
    log_prob_T, rollout_T = torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0])
    settings = CorrectionSettings(reject="token", reject_low=1.0, reject_high=1.0)
    keep_T = rollout_correction(
        log_prob_T, rollout_T, torch.ones(2, dtype=torch.bool), torch.zeros(2).long(), 1, settings
    )[1]
    assert keep_T.tolist() == [True, True]


def test_a_very_long_row_stays_finite() -> None:
    # the sum of d is 1000, held at 20; a cap of 1e12 lets exp(20) through
    log_prob_T, mask_T, row_T = torch.zeros(1000), torch.ones(1000, dtype=torch.bool), torch.zeros(1000).long()
    settings = CorrectionSettings(importance="sequence", importance_cap=1e12)
    weight_T = rollout_correction(log_prob_T, log_prob_T - 1.0, mask_T, row_T, 1, settings).weight_T
    torch.testing.assert_close(weight_T, torch.full((1000,), math.exp(20.0)))


def test_nothing_to_count_is_zero() -> None:
    settings = CorrectionSettings(importance="token", reject="token")
    nothing = rollout_correction(LOG_PROB_T, ROLLOUT_T, torch.zeros_like(MASK_T), ROW_T, 4, settings)
    assert set(nothing.metrics.values()) == {0.0} and not nothing.keep_T.any()
    only_bad_T = torch.tensor([False, True] + [False] * 7)
    rejected = rollout_correction(LOG_PROB_T, ROLLOUT_T, only_bad_T, ROW_T, 4, settings)
    assert rejected.metrics["rejected_share"] == 1.0 and rejected.metrics["effective_sample_share"] == 0.0
    assert rejected.metrics["log_ratio_abs_mean"] == pytest.approx(math.log(4))


def test_no_gradient_flows() -> None:
    log_prob_T = LOG_PROB_T.clone().requires_grad_()
    weight_T = rollout_correction(
        log_prob_T, ROLLOUT_T, MASK_T, ROW_T, 4, CorrectionSettings(importance="token")
    ).weight_T
    assert not weight_T.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_policy_token_without_a_number_is_an_error(bad: float) -> None:
    rollout_T = ROLLOUT_T.clone()
    rollout_T[3] = bad
    with pytest.raises(ValueError, match="not finite at 1 policy tokens"):
        rollout_correction(LOG_PROB_T, rollout_T, MASK_T, ROW_T, 4, CorrectionSettings())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance": "row"}, "unknown importance 'row'; known: none, token, sequence"),
        ({"reject": "row"}, "unknown reject 'row'; known: none, token, sequence, geometric"),
        ({"importance_cap": 0.5}, "importance_cap is 0.5"),
        ({"reject_low": 1.5}, "reject_low 1.5"),
        ({"reject_high": 0.9}, "reject_high 0.9"),
        ({"reject_low": -0.1}, "reject_low -0.1"),
    ],
)
def test_settings_that_make_no_sense(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionSettings(**settings)


SETTINGS = st.builds(
    CorrectionSettings,
    importance=st.sampled_from(["none", "token", "sequence"]),
    importance_cap=st.sampled_from([1.0, 1.5, 4.0]),
    reject=st.sampled_from(["none", "token", "sequence", "geometric"]),
    reject_low=st.sampled_from([0.0, 0.5, 0.8]),
    reject_high=st.sampled_from([1.1, 2.0]),
)


@given(SETTINGS, st.integers(0, 2**31), st.integers(1, 12), st.sampled_from([math.nan, math.inf, 50.0]))
def test_order_and_masked_values_do_not_matter(
    settings: CorrectionSettings, seed: int, num_tokens: int, junk: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_prob_T, rollout_T = -torch.rand(2, num_tokens, generator=generator, dtype=torch.float64)
    mask_T = torch.rand(num_tokens, generator=generator) < 0.7
    row_T = torch.randint(3, (num_tokens,), generator=generator)
    order = torch.randperm(num_tokens, generator=generator)
    names_B = torch.randperm(3, generator=generator)
    plain = rollout_correction(log_prob_T, rollout_T, mask_T, row_T, 3, settings)
    moved = rollout_correction(
        torch.where(mask_T, log_prob_T, junk)[order],
        torch.where(mask_T, rollout_T, -junk)[order],
        mask_T[order],
        names_B[row_T][order],
        3,
        settings,
    )
    torch.testing.assert_close(moved.weight_T, plain.weight_T[order])
    assert torch.equal(moved.keep_T, plain.keep_T[order])
    assert moved.metrics == pytest.approx(plain.metrics, rel=1e-9, abs=1e-12)
    assert (plain.weight_T <= max(settings.importance_cap, 1.0)).all() and (plain.weight_T > 0).all()
    assert plain.weight_T[~plain.keep_T].tolist() == [1.0] * int((~plain.keep_T).sum())
