"""Shared random generators: what is put back goes on with the same numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from verl.process.determinism import random_state, seed_everything, set_random_state, use_deterministic_kernels


def draw() -> list[float]:
    """One number of each kind; the normal ones leave a spare one behind in Python's and in NumPy's generator."""
    return [random.random(), random.gauss(), np.random.random(), np.random.normal(), float(torch.rand(()))]


def test_what_is_put_back_goes_on_with_the_same_numbers() -> None:
    seed_everything(1)
    draw()
    state = random_state()
    assert all(tensor.dtype is torch.uint8 for tensor in state.values())
    following = [draw() for _ in range(400)]  # past the end of a block of 624 words
    seed_everything(2)
    draw()
    draw()
    set_random_state(state)
    assert [draw() for _ in range(400)] == following


def test_a_generator_that_is_not_named_stays() -> None:
    seed_everything(3)
    state = random_state()
    expected = draw()
    set_random_state({"python": state["python"]})
    assert (again := draw())[:2] == expected[:2] and again[2:] != expected[2:]


def test_seeds_decide_everything() -> None:
    seed_everything(4)
    first = draw()
    seed_everything(4)
    assert draw() == first
    seed_everything(2**32 + 4)  # more than NumPy takes
    assert all(one != other for one, other in zip(draw()[:2], first[:2], strict=True))


def test_an_operation_without_a_deterministic_kernel_is_refused() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        use_deterministic_kernels()
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.nn.ReplicationPad3d(1)(torch.ones(1, 1, 2, 2, 2, requires_grad=True)).sum().backward()
            torch.empty(2).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(before)
