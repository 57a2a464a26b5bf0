"""KL: sampled estimators by enumerating the token, exact ones by autograd, KL in the reward, and its weight."""

from __future__ import annotations

import math

import pytest
import torch
from exact_numbers import f64
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.kl import (
    EXACT_KL,
    SAMPLED_KL,
    SAMPLED_KL_NAMES,
    AdaptiveKL,
    FixedKL,
    importance_weight,
    kl_to_go,
    penalised_rewards,
    sampled_kl,
)

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
def test_sampled_by_hand(names: tuple[str, ...], values: tuple[float, float], gradients: tuple[float, float]) -> None:
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


def random_logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(5, 7, generator=generator, dtype=torch.float64)


def defined(name: str, logits_TV: torch.Tensor, reference_TV: torch.Tensor) -> torch.Tensor:
    p_TV, q_TV = logits_TV.softmax(-1), reference_TV.softmax(-1)
    first_TV, second_TV = (p_TV, q_TV) if name == "full_reverse" else (q_TV, p_TV)
    return torch.stack([(a * (a / b).log()).sum() for a, b in zip(first_TV, second_TV, strict=True)])


@pytest.mark.parametrize("name", EXACT_KL)
def test_the_definition_and_its_gradient(name: str) -> None:
    logits_TV, reference_TV = random_logits(0).requires_grad_(), random_logits(1)
    expected_T = defined(name, logits_TV, reference_TV)
    log_p_TV, log_q_TV = logits_TV.detach().log_softmax(-1), reference_TV.log_softmax(-1)
    given_TV = log_p_TV.clone(), log_q_TV.clone()
    kl_T = EXACT_KL[name].value(log_p_TV, log_q_TV)
    torch.testing.assert_close(kl_T, expected_T.detach(), atol=1e-12, rtol=0)
    gradient_TV = EXACT_KL[name].logit_gradient(log_p_TV, log_q_TV, kl_T)
    torch.testing.assert_close(gradient_TV, torch.autograd.grad(expected_T.sum(), logits_TV)[0], atol=1e-12, rtol=0)
    assert torch.equal(log_p_TV, given_TV[0]) and torch.equal(log_q_TV, given_TV[1])


@pytest.mark.parametrize("name", EXACT_KL)
def test_value_can_be_differentiated_and_gives_the_reference_nothing(name: str) -> None:
    reference_TV = random_logits(1).requires_grad_()

    def kl(logits_TV: torch.Tensor) -> torch.Tensor:
        return EXACT_KL[name].value(logits_TV.log_softmax(-1), reference_TV.log_softmax(-1))

    logits_TV = random_logits(0).requires_grad_()
    assert torch.autograd.gradcheck(kl, (logits_TV,))
    kl(logits_TV).sum().backward()
    assert logits_TV.grad is not None and reference_TV.grad is None


@pytest.mark.parametrize("name", EXACT_KL)
def test_zero_for_equal_distributions_and_positive_otherwise(name: str) -> None:
    log_p_TV = random_logits(0).log_softmax(-1)
    shifted_TV = (random_logits(0) + 5.0).log_softmax(-1)
    kl_T = EXACT_KL[name].value(log_p_TV, shifted_TV)
    assert kl_T.abs().max() < 1e-12
    assert EXACT_KL[name].logit_gradient(log_p_TV, shifted_TV, kl_T).abs().max() < 1e-12
    assert (EXACT_KL[name].value(log_p_TV, random_logits(1).log_softmax(-1)) > 0).all()


NAN = float("nan")
MASK_T = torch.tensor([True, False, True, True, True])


def test_penalised_rewards_by_hand() -> None:
    reward_T = torch.tensor([0.0, 7.0, 1.0, 0.0, -1.0])
    kl_T = torch.tensor([1.0, NAN, -2.0, 0.0, 4.0], requires_grad=True)
    penalised_T = penalised_rewards(reward_T, kl_T, MASK_T, beta=0.5)
    assert penalised_T.tolist() == [-0.5, 7.0, 2.0, 0.0, -3.0]
    assert not penalised_T.requires_grad
    assert reward_T.tolist() == [0.0, 7.0, 1.0, 0.0, -1.0]


def test_kl_to_go_by_hand() -> None:
    # row 0: 1, masked, 4; row 3: 2, -5
    kl_T = torch.tensor([1.0, NAN, 4.0, 2.0, -5.0], requires_grad=True)
    to_go_T = kl_to_go(kl_T, MASK_T, torch.tensor([0, 0, 0, 3, 3]))
    assert to_go_T.tolist() == [5.0, 4.0, 4.0, -3.0, -5.0]
    assert to_go_T.dtype == torch.float32 and not to_go_T.requires_grad


def test_kl_to_go_of_no_token() -> None:
    assert kl_to_go(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_a_short_row_after_long_ones_keeps_its_precision() -> None:
    kl_T = torch.cat([torch.full((200_000,), 1000.0), torch.tensor([1e-4, 2e-4])])
    row_T = torch.cat([torch.zeros(200_000, dtype=torch.int64), torch.ones(2, dtype=torch.int64)])
    to_go_T = kl_to_go(kl_T, torch.ones(200_002, dtype=torch.bool), row_T)
    torch.testing.assert_close(to_go_T[-2:], torch.tensor([3e-4, 2e-4]), rtol=1e-3, atol=0)


def test_rows_out_of_order_are_an_error() -> None:
    with pytest.raises(ValueError, match="row_T goes down"):
        kl_to_go(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor([0, 1, 0]))


@given(st.lists(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=6), min_size=1, max_size=5))
def test_kl_to_go_is_the_masked_sum_to_the_end_of_each_row(rows: list[list[tuple[float, bool]]]) -> None:
    kl_T = torch.tensor([kl for row in rows for kl, _ in row], dtype=torch.float64)
    mask_T = torch.tensor([kept for row in rows for _, kept in row])
    row_T = torch.tensor([number for number, row in enumerate(rows) for _ in row])
    expected = [sum(kl for kl, kept in row[start:] if kept) for row in rows for start in range(len(row))]
    assert kl_to_go(kl_T, mask_T, row_T).tolist() == pytest.approx(expected, abs=1e-12)


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
