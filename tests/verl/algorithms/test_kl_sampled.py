"""Sampled KL estimators: values by hand, expected values and gradients by enumerating the token."""

from __future__ import annotations

import math

import pytest
import torch
from exact_numbers import f64

from verl.algorithms.kl import SAMPLED_KL, SAMPLED_KL_NAMES, importance_weight, sampled_kl

L = math.log(2)


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("names", "values", "gradients"),
    [
        # d = log 2 and -log 2, so w = 1/2 and 2; r = 1 with the gradient of l
        (("kl", "k1"), (L, -L), (1.0, 1.0)),
        (("abs",), (L, L), (1.0, -1.0)),
        (("mse", "k2"), (L**2 / 2, L**2 / 2), (L, -L)),
        (("low_var_kl", "k3"), (L - 0.5, 1 - L), (0.5, -1.0)),  # gradient 1 - w
        (("k3plusplus",), (L - 0.5, 1 - L), (L, -L)),  # gradient k3 + 1 - w = d
        (("k4",), (L, -L), (L, -L)),  # gradient r d
        (("k5",), (-L / 2, 2 * L), (0.5, -1.0)),  # value w log w, gradient -w + 1
    ],
)
def test_by_hand(names: tuple[str, ...], values: tuple[float, float], gradients: tuple[float, float]) -> None:
    for name in names:
        log_prob_T, reference_T = f64(-1.0, -2.0, grad=True), f64(-1.0 - L, -2.0 + L, grad=True)
        kl_T = sampled_kl(name)(log_prob_T, reference_T)
        close(kl_T, f64(*values))
        kl_T.sum().backward()
        close(log_prob_T.grad, f64(*gradients))
        assert reference_T.grad is None


@pytest.mark.parametrize("name", SAMPLED_KL)
def test_plus_has_the_named_value_and_the_gradient_of_k2(name: str) -> None:
    log_prob_T, reference_T = f64(-1.0, -2.0, grad=True), f64(-1.0 - L, -2.0 + L, grad=True)
    kl_T = sampled_kl(f"{name}+")(log_prob_T, reference_T)
    close(kl_T, SAMPLED_KL[name](log_prob_T, reference_T))
    kl_T.sum().backward()
    close(log_prob_T.grad, f64(L, -L))
    assert reference_T.grad is None


# d = -1000, 0 and 1000; w = exp(20), 1 and exp(-20) after its clamp
@pytest.mark.parametrize(
    ("name", "values", "gradients"),
    [
        ("k3", (10.0, 0.0, 10.0), (0.0, 0.0, 0.0)),
        ("k3plusplus", (10.0, 0.0, 10.0), (10.0, 0.0, 10.0)),
        ("k5", (20 * math.exp(20), 0.0, -20 * math.exp(-20)), (1.0, 0.0, 1.0)),
    ],
)
def test_far_from_the_reference_nothing_overflows(
    name: str, values: tuple[float, ...], gradients: tuple[float, ...]
) -> None:
    log_prob_T = f64(-1000.0, -1.0, 0.0, grad=True)
    kl_T = SAMPLED_KL[name](log_prob_T, f64(0.0, -1.0, -1000.0))
    torch.testing.assert_close(kl_T, f64(*values), atol=1e-12, rtol=1e-12)
    kl_T.sum().backward()
    close(log_prob_T.grad, f64(*gradients))


# p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), so d = (L, -L, 0) and either KL is L / 4.
# grad KL(p || q) = p (d - KL) = (3L/8, -5L/16, -L/16); grad KL(q || p) = p - q = (1/4, -1/4, 0).
P_V, Q_V = f64(0.5, 0.25, 0.25), f64(0.25, 0.5, 0.25)
REVERSE_V, FORWARD_V = f64(3 * L / 8, -5 * L / 16, -L / 16), f64(0.25, -0.25, 0.0)
EXPECTED = {
    "k1": (L / 4, f64(0.0, 0.0, 0.0)),
    # sum_v p_v |d_v| = 3L/4; sum_v p_v sign(d_v) (e_v - p) = (1/2, -1/4, 0) - (1/2 - 1/4) p
    "abs": (3 * L / 4, f64(3 / 8, -5 / 16, -1 / 16)),
    "k2": (3 * L**2 / 8, REVERSE_V),
    "k3": (L / 4, FORWARD_V),
    "k3plusplus": (L / 4, REVERSE_V),
    "k4": (L / 4, REVERSE_V),
    "k5": (L / 4, FORWARD_V),
    "k1+": (L / 4, REVERSE_V),
    "k3+": (L / 4, REVERSE_V),
    "k5+": (L / 4, REVERSE_V),
}


@pytest.mark.parametrize("sampler_V", [P_V, f64(0.1, 0.3, 0.6)], ids=["on policy", "older policy"])
@pytest.mark.parametrize("name", EXPECTED)
def test_expectation(name: str, sampler_V: torch.Tensor) -> None:
    """Under an older policy with the importance weight, which is 1 on policy and a constant."""
    logits_V = P_V.log().requires_grad_()
    log_p_V = logits_V.log_softmax(0)
    weight_V = 1 if sampler_V is P_V else importance_weight(log_p_V, sampler_V.log())
    expected_kl = (sampler_V * weight_V * sampled_kl(name)(log_p_V, Q_V.log())).sum()
    value, gradient_V = EXPECTED[name]
    assert expected_kl.item() == pytest.approx(value, abs=1e-12)
    close(torch.autograd.grad(expected_kl, logits_V)[0], gradient_V)


def test_importance_weight() -> None:
    log_prob_T, old_T = f64(-1.0, -1.0, 0.0, -1000.0, grad=True), f64(-1.0 - L, -1.0 + L, -1000.0, 0.0)
    weight_T = importance_weight(log_prob_T, old_T)
    assert not weight_T.requires_grad
    torch.testing.assert_close(weight_T, f64(2.0, 0.5, math.exp(20), math.exp(-20)), atol=0, rtol=1e-12)
    close(importance_weight(log_prob_T, old_T, upper=1.5)[:2], f64(1.5, 0.5))
    close(importance_weight(log_prob_T, old_T, lower=0.75), f64(2.0, 0.75, math.exp(20), 0.75))
    close(importance_weight(log_prob_T, old_T, 0.75, 1.5), f64(1.5, 0.75, 1.5, 0.75))
    with pytest.raises(ValueError, match="lower bound 2 is above the upper bound 1"):
        importance_weight(log_prob_T, old_T, 2, 1)


def test_names() -> None:
    assert set(SAMPLED_KL_NAMES) == {*SAMPLED_KL, *(f"{name}+" for name in SAMPLED_KL)}
    assert all(callable(sampled_kl(name)) for name in SAMPLED_KL_NAMES)


@pytest.mark.parametrize("name", ["k6", "k3++", "+", "full_reverse"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="use one of kl, k1, abs, mse, k2, low_var_kl, k3, k3plusplus, k4, k5, or"):
        sampled_kl(name)
