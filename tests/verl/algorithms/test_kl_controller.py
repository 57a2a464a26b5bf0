"""The weight of the KL: each case of the adaptive rule by hand."""

from __future__ import annotations

import pytest

from verl.algorithms.kl import AdaptiveKL, FixedKL


def test_fixed_stays() -> None:
    controller = FixedKL(0.05)
    controller.update(current_kl=100.0, num_trajectories=512)
    assert controller.value == 0.05


# n / horizon = 1/2. Errors: 3/2 - 1 is cut to 0.2; 1.1 - 1 = 0.1; 0; 0.9 - 1 = -0.1; 0 - 1 is cut to -0.2
@pytest.mark.parametrize(
    ("current_kl", "value"), [(0.03, 0.11), (0.022, 0.105), (0.02, 0.1), (0.018, 0.095), (0.0, 0.09), (-5.0, 0.09)]
)
def test_adaptive_by_hand(current_kl: float, value: float) -> None:
    controller = AdaptiveKL(coef=0.1, target=0.02, horizon=1000)
    assert controller.value == 0.1
    controller.update(current_kl, num_trajectories=500)
    assert controller.value == pytest.approx(value, rel=1e-12)


def test_adaptive_steers_a_policy_to_the_target() -> None:
    """A policy whose KL falls as 1 / beta ends at the target."""
    controller = AdaptiveKL(coef=1.0, target=0.5, horizon=100)
    for _ in range(300):
        controller.update(1.0 / (10 * controller.value), num_trajectories=50)
    assert controller.value == pytest.approx(0.2, rel=1e-6)


def test_what_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="the coefficient is -1; it must be at least 0"):
        FixedKL(-1)
    with pytest.raises(ValueError, match="target is 0 and horizon 10; both must be above 0"):
        AdaptiveKL(0.1, 0, 10)
    with pytest.raises(ValueError, match="target is 1 and horizon 0"):
        AdaptiveKL(0.1, 1, 0)
    controller = AdaptiveKL(0.1, 1.0, 100)
    with pytest.raises(ValueError, match="mean KL is nan"):
        controller.update(float("nan"), 10)
    with pytest.raises(ValueError, match="500 trajectories a step with a horizon of 100 .* set the horizon above 100"):
        controller.update(0.0, 500)
    controller.update(0.0, 499)
    assert 0 < controller.value < 0.1
