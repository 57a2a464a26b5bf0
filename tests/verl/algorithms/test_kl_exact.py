"""Exact KL: values and gradients by hand, against autograd on the definition, and by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from verl.algorithms.kl import EXACT_KL


def random_logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(5, 7, generator=generator, dtype=torch.float64)


def defined(name: str, logits_TV: torch.Tensor, reference_TV: torch.Tensor) -> torch.Tensor:
    p_TV, q_TV = logits_TV.softmax(-1), reference_TV.softmax(-1)
    first_TV, second_TV = (p_TV, q_TV) if name == "full_reverse" else (q_TV, p_TV)
    return torch.stack([(a * (a / b).log()).sum() for a, b in zip(first_TV, second_TV, strict=True)])


# p = (3/4, 1/4), q = (1/2, 1/2):
# KL(p || q) = 3/4 log(3/2) + 1/4 log(1/2), gradient p (log p - log q - KL) = 3/16 (log(3/2) - log(1/2)) (1, -1)
# KL(q || p) = 1/2 log(2/3) + 1/2 log 2,    gradient p - q
@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("full_reverse", 0.75 * math.log(1.5) + 0.25 * math.log(0.5), 3 / 16 * math.log(3)),
        ("full_forward", 0.5 * math.log(2 / 3) + 0.5 * math.log(2), 0.25),
    ],
)
def test_by_hand(name: str, value: float, gradient: float) -> None:
    log_p_TV = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    log_q_TV = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    kl_T = EXACT_KL[name].value(log_p_TV, log_q_TV)
    assert kl_T.tolist() == pytest.approx([value], abs=1e-14)
    gradient_TV = EXACT_KL[name].logit_gradient(log_p_TV, log_q_TV, kl_T)
    expected_TV = torch.tensor([[gradient, -gradient]], dtype=torch.float64)
    torch.testing.assert_close(gradient_TV, expected_TV, atol=1e-14, rtol=0)


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
