"""LLDS: gates and hinge by hand, gradient by autograd on the definition in float64."""

from __future__ import annotations

import torch
from exact_numbers import f64
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.likelihood import llds

# l_old - l = 0.5, -0.2 | 0.3, -0.4 | 0.6, 0.1 | 0.7, 0
LOG_PROB = (-1.5, -0.8, -1.3, -0.6, -1.6, -1.1, -1.7, -1.0)
OLD_T = f64(*[-1.0] * 8)
UNIT_T = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
# unit 0 fell by 0.3: only its falling token counts; 1 rose by 0.1; 2 fell but was bad; 3 fell with advantage exactly 0
ADVANTAGE_T = f64(1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 0.0)


def test_by_hand() -> None:
    log_prob_T = f64(*LOG_PROB, grad=True)
    penalty_T = llds(log_prob_T, OLD_T, ADVANTAGE_T, UNIT_T)
    torch.testing.assert_close(penalty_T, f64(0.5, 0, 0, 0, 0, 0, 0.7, 0))
    penalty_T.sum().backward()
    assert log_prob_T.grad is not None and log_prob_T.grad.tolist() == [-1.0, 0, 0, 0, 0, 0, -1.0, 0]


def test_the_unit_of_the_gate_matters() -> None:
    # the first four tokens as one row fall by 0.3 - 0.1 = 0.2, so the falling token of the second turn counts as well
    penalty_T = llds(f64(*LOG_PROB[:4]), OLD_T[:4], ADVANTAGE_T[:4], torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(penalty_T, f64(0.5, 0, 0.3, 0))


def test_equal_log_probs_have_no_penalty_and_no_gradient() -> None:
    log_prob_T = f64(-1.0, -2.0, grad=True)
    penalty_T = llds(log_prob_T, log_prob_T.detach().clone(), f64(1.0, 1.0), torch.zeros(2, dtype=torch.int64))
    penalty_T.sum().backward()
    assert log_prob_T.grad is not None and not penalty_T.any() and not log_prob_T.grad.any()


def test_gradient_goes_to_the_policy_only() -> None:
    log_prob_T, old_T, advantage_T = f64(-2.0, grad=True), f64(-1.0, grad=True), f64(1.0, grad=True)
    llds(log_prob_T, old_T, advantage_T, torch.zeros(1, dtype=torch.int64)).sum().backward()
    assert log_prob_T.grad is not None and old_T.grad is None and advantage_T.grad is None


def test_no_token_gives_no_penalty() -> None:
    assert llds(f64(), f64(), f64(), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@given(st.integers(0, 2**31), st.integers(1, 12))
def test_equal_to_the_definition_in_any_order(seed: int, num_tokens: int) -> None:
    """Value and gradient against a loop over units; tokens are shuffled and units have any numbers."""
    generator = torch.Generator().manual_seed(seed)
    log_prob_T = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    old_T = -3 * torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    index_T = torch.randint(3, (num_tokens,), generator=generator)
    advantage_U = torch.randn(3, generator=generator, dtype=torch.float64)
    log_prob_T.requires_grad_()

    total = torch.zeros((), dtype=torch.float64)
    for unit in range(3):
        fall = (old_T - log_prob_T)[index_T == unit]
        if advantage_U[unit] >= 0 and fall.sum() > 0:
            total = total + sum(torch.relu(value) for value in fall)
    expected_T = torch.autograd.grad(total + 0 * log_prob_T.sum(), log_prob_T)[0]

    penalty_T = llds(log_prob_T, old_T, advantage_U[index_T], torch.tensor([10**9, 0, 7])[index_T])
    torch.testing.assert_close(penalty_T.sum(), total)
    torch.testing.assert_close(torch.autograd.grad(penalty_T.sum(), log_prob_T)[0], expected_T)
