"""The clipped value loss: numbers by hand, gradient by autograd on the definition."""

from __future__ import annotations

import math

import pytest
import torch
from exact_numbers import f64

from verl.algorithms.value_loss import value_loss


def test_by_hand() -> None:
    # old value 0, clip 1/2. V, R:
    #   1, 2     clipped to 1/2, further from R: (3/2)^2 / 2 = 9/8, no gradient
    #   1, -1    clipped to 1/2, nearer to R:    2^2 / 2 = 2, gradient V - R = 2
    #   1/4, 2   not clipped:                    (7/4)^2 / 2 = 49/32, gradient -7/4
    #   -1, -3   clipped to -1/2, further:       (5/2)^2 / 2 = 25/8, no gradient
    value_T = f64(1.0, 1.0, 0.25, -1.0, grad=True)
    answer = value_loss(value_T, f64(0, 0, 0, 0), f64(2.0, -1.0, 2.0, -3.0), 0.5)
    torch.testing.assert_close(answer.loss_T, f64(9 / 8, 2, 49 / 32, 25 / 8), atol=1e-12, rtol=0)
    assert answer.clipped_T.tolist() == [True, False, False, True]
    answer.loss_T.sum().backward()
    torch.testing.assert_close(value_T.grad, f64(0, 2, -7 / 4, 0), atol=1e-12, rtol=0)


def test_equals_the_definition_in_value_and_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    value_T, old_value_T, return_T = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    losses, gradients = [], []
    for value, old, target in zip(value_T.tolist(), old_value_T.tolist(), return_T.tolist(), strict=True):
        v = f64(value, grad=True)
        near = old + 0.4 if value > old + 0.4 else old - 0.4 if value < old - 0.4 else v
        free, clipped = (v - target) ** 2, (near - target) ** 2 + 0 * v
        loss = 0.5 * (clipped if float(clipped.detach()) > float(free.detach()) else free)
        losses.append(float(loss.detach()))
        gradients.append(float(torch.autograd.grad(loss, v)[0]))
    value_T.requires_grad_()
    loss_T = value_loss(value_T, old_value_T, return_T, 0.4).loss_T
    loss_T.sum().backward()
    torch.testing.assert_close(loss_T.detach(), f64(*losses), atol=1e-12, rtol=0)
    torch.testing.assert_close(value_T.grad, f64(*gradients), atol=1e-12, rtol=0)


def test_gradient_goes_to_the_value_only() -> None:
    tensors = [f64(0.5, grad=True) for _ in range(3)]
    value_loss(tensors[0], tensors[1], tensors[2], 0.5).loss_T.sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is None and tensors[2].grad is None


def test_an_infinite_range_is_the_plain_squared_error() -> None:
    answer = value_loss(f64(10.0, -10.0), f64(0.0, 0.0), f64(12.0, 0.0), math.inf)
    assert answer.loss_T.tolist() == [2.0, 50.0] and not answer.clipped_T.any()


@pytest.mark.parametrize("clip", [0.0, -0.5, math.nan])
def test_a_range_must_be_positive(clip: float) -> None:
    with pytest.raises(ValueError, match="clip range of the value loss is"):
        value_loss(f64(1.0), f64(1.0), f64(1.0), clip)
