"""Numbers of 64 bits, and what counts as the same, in tests whose numbers are worked out by hand."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")


def f64(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def same(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
