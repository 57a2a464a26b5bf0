"""Entropy: value and gradient by hand."""

from __future__ import annotations

import math

import torch

from verl.algorithms.entropy import entropy


def test_by_hand() -> None:
    # p = (3/4, 1/4): H = log 4 - 3/4 log 3, and d H / d z_0 = -p_0 (log p_0 + H) = -3/16 log 3
    # uniform: log 2, and no gradient
    logits_TV = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    log_p_TV = logits_TV.log_softmax(-1)
    entropy_T = entropy(log_p_TV)
    expected_T = torch.tensor([math.log(4) - 0.75 * math.log(3), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(entropy_T, expected_T, atol=1e-14, rtol=0)
    slope = 3 / 16 * math.log(3)
    expected_TV = torch.tensor([[-slope, slope], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(entropy_T.sum(), logits_TV)[0], expected_TV, atol=1e-14, rtol=0)
