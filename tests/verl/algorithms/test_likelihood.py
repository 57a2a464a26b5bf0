"""LLDS, which rows are trained on, the rule of the anchor, and the registry."""

from __future__ import annotations

import pytest
import torch
from exact_numbers import f64
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.anchor import follow
from verl.algorithms.likelihood import llds
from verl.algorithms.registry import Registry
from verl.algorithms.selection import informative_rows, zero_variance_groups

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


@pytest.mark.parametrize(
    ("falls", "penalty"),
    [
        # Rounding is at most 64 2^-23 (1 + 1) = 1.526e-5 for a token whose old log-prob is -1.
        ((1.5e-5, 1.5e-5), (0.0, 0.0)),
        ((1.5e-5, -1e-5), (0.0, 0.0)),
        ((1.6e-5, 1.6e-5), (1.6e-5, 1.6e-5)),
        ((4e-5, -1e-5), (0.0, 0.0)),  # by 3e-5 together, where 3.05e-5 may be rounding
        ((4.2e-5, -1e-5), (4.2e-5, 0.0)),
        ((0.01, 1e-6), (0.01, 0.0)),  # a fall of the whole turn does not open the hinge for what is rounding
    ],
)
def test_a_fall_within_the_rounding_of_log_probs_is_none(falls: tuple[float, ...], penalty: tuple[float, ...]) -> None:
    old_T = f64(-1.0, -1.0)
    log_prob_T = (old_T - f64(*falls)).requires_grad_()
    penalty_T = llds(log_prob_T, old_T, f64(1.0, 1.0), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(penalty_T, f64(*penalty), atol=1e-12, rtol=0)
    [slope_T] = torch.autograd.grad(penalty_T.sum(), log_prob_T)
    assert slope_T.tolist() == [-1.0 if fall else 0.0 for fall in penalty]


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


def test_zero_variance_groups_by_hand() -> None:
    # group 0: 1, 1 (equal); 1: 0, 1; 2: one row; 3: no row; 4: three times -0.3 (equal)
    reward_B = torch.tensor([1.0, 0.0, -0.3, 1.0, 1.0, 0.5, -0.3, -0.3])
    group_B = torch.tensor([0, 1, 4, 0, 1, 2, 4, 4])
    assert zero_variance_groups(reward_B, group_B).tolist() == [True, False, False, False, True]
    assert informative_rows(reward_B, group_B).tolist() == [False, True, False, False, True, False, False, False]


def test_rewards_that_differ_a_little_differ() -> None:
    reward_B = torch.tensor([1.0, 1.0 + torch.finfo(torch.float32).eps])
    assert zero_variance_groups(reward_B, torch.tensor([0, 0])).tolist() == [False]


def test_no_row_no_group() -> None:
    none_B = torch.zeros(0, dtype=torch.int64)
    assert zero_variance_groups(torch.zeros(0), none_B).tolist() == []
    assert informative_rows(torch.zeros(0), none_B).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 1.0])), min_size=1), st.randoms())
def test_equal_to_counting_different_rewards(rows: list[tuple[int, float]], random) -> None:
    """A row is kept when its group has at least two different rewards, in whatever order the rows come."""
    random.shuffle(rows)
    members = {group: [reward for other, reward in rows if other == group] for group, _ in rows}
    expected = [len(set(members[group])) > 1 for group, _ in rows]
    kept_B = informative_rows(torch.tensor([r for _, r in rows]), torch.tensor([group for group, _ in rows]))
    assert kept_B.tolist() == expected


def test_anchor_follows() -> None:
    anchor = [f64(1.0, 2.0), f64(10.0)]
    policy = [f64(3.0, 2.0), f64(0.0)]
    follow(anchor, policy, 0.9)
    torch.testing.assert_close(anchor[0], f64(1.2, 2.0), atol=1e-12, rtol=0)
    torch.testing.assert_close(anchor[1], f64(9.0), atol=1e-12, rtol=0)
    follow(anchor, policy, 1.0)
    assert anchor[1].item() == pytest.approx(9.0)
    follow(anchor, policy, 0.0)
    assert torch.equal(anchor[0], policy[0]) and torch.equal(anchor[1], policy[1])


def test_an_anchor_equal_to_the_policy_does_not_move_by_a_bit() -> None:
    weights = [torch.randn(1000)]
    anchor = [weights[0].clone()]
    follow(anchor, weights, 0.937)
    assert torch.equal(anchor[0], weights[0])


def test_anchor_rejects_what_is_no_average() -> None:
    with pytest.raises(ValueError, match="tau is 1.5"):
        follow([f64(1.0)], [f64(1.0)], 1.5)
    with pytest.raises(ValueError, match="anchor has 1 tensors, policy has 0"):
        follow([f64(1.0)], [], 0.5)


def test_a_name_is_registered_once() -> None:
    registry: Registry = Registry("thing")
    registry.register("a", "b")(len)
    assert registry["a"] is len and set(registry) == {"a", "b"} and "c" not in registry
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        registry.register("a")(max)
    with pytest.raises(KeyError, match="unknown thing 'c'; known: a, b"):
        registry["c"]


def test_a_name_without_a_row_in_the_table_of_traits_is_not_registered() -> None:
    with pytest.raises(ValueError, match="advantage estimator 'mine' has no row in verl/algorithms/traits.py: add one"):
        ADVANTAGES.register("mine")(max)
    assert "mine" not in ADVANTAGES
