"""The anchor's rule, in numbers by hand, and the registry."""

from __future__ import annotations

import pytest
import torch
from exact_numbers import f64

from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.anchor import follow
from verl.algorithms.registry import Registry


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
