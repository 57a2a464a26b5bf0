"""What the Top-k KL is on average: by enumerating every token that could be sampled, and at full size by sampling.

With y drawn from p, or from p_old with the weight p / p_old:
  corrected: E[kl] = KL and E[grad kl] = grad KL
  published: E[kl] = KL and E[grad kl] = grad KL + grad M_S (reverse), grad KL - grad M_S (forward)
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.kl import TOPK_KL, importance_weight

BIAS_SIGN = {"full_reverse": 1.0, "full_forward": -1.0}


class Case(NamedTuple):
    """A policy, an older policy that samples, a reference (logits), and the size of the head."""

    logits_V: torch.Tensor
    old_logits_V: torch.Tensor
    reference_V: torch.Tensor
    k: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Vocabularies of 2 to 12, near uniform to very peaked, near to and far from the reference, every k."""
    size = draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def noise() -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    logits_V = draw(st.sampled_from([0.1, 1.0, 3.0])) * noise()
    old_logits_V = logits_V + draw(st.sampled_from([0.01, 0.3, 1.0])) * noise()
    reference_V = logits_V + draw(st.sampled_from([0.001, 0.05, 1.0])) * noise()
    return Case(logits_V, old_logits_V, reference_V, draw(st.integers(0, size)))


def head(name: str, case: Case) -> torch.Tensor:
    """S: the most likely tokens of the sampling policy for reverse, of the reference for forward."""
    return (case.old_logits_V if name == "full_reverse" else case.reference_V).topk(case.k).indices


def exact(name: str, logits_V: torch.Tensor, reference_V: torch.Tensor) -> torch.Tensor:
    p_V, q_V = logits_V.softmax(0), reference_V.softmax(0)
    return (p_V * (p_V / q_V).log()).sum() if name == "full_reverse" else (q_V * (q_V / p_V).log()).sum()


def expected(name: str, case: Case, logits_V: torch.Tensor, gradient: str, on_policy: bool) -> torch.Tensor:
    """Sum over the whole vocabulary of P(y) times what the Top-k KL says when y was sampled."""
    log_p_V, log_q_V = logits_V.log_softmax(0), case.reference_V.log_softmax(0)
    log_sampler_V = log_p_V.detach() if on_policy else case.old_logits_V.log_softmax(0)
    weight_V = None if on_policy else importance_weight(log_p_V, log_sampler_V)
    index_Vk = head(name, case).expand(len(log_p_V), -1)
    in_S_V = torch.isin(torch.arange(len(log_p_V)), index_Vk[0])
    kl_V = TOPK_KL[name](
        log_p_V[index_Vk], log_q_V[index_Vk], log_p_V, log_q_V, in_S_V, gradient=gradient, weight_T=weight_V
    )
    return (log_sampler_V.exp() * kl_V).sum()


def gradient_of(value: torch.Tensor, logits_V: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits_V)[0]


@pytest.mark.parametrize("on_policy", [True, False], ids=["on policy", "off policy"])
@pytest.mark.parametrize("name", TOPK_KL)
@given(case=cases())
def test_expectation_by_enumeration(name: str, on_policy: bool, case: Case) -> None:
    logits_V = case.logits_V.clone().requires_grad_()
    true_value = exact(name, logits_V, case.reference_V)
    true_V = gradient_of(true_value, logits_V)
    mass_V = gradient_of(logits_V.softmax(0)[head(name, case)].sum(), logits_V)
    for gradient, bias_V in (("corrected", torch.zeros_like(mass_V)), ("published", BIAS_SIGN[name] * mass_V)):
        value = expected(name, case, logits_V, gradient, on_policy)
        torch.testing.assert_close(value, true_value, atol=1e-10, rtol=0)
        torch.testing.assert_close(gradient_of(value, logits_V), true_V + bias_V, atol=1e-10, rtol=0)


VOCABULARY = 150_000
K = 32
NUM_SAMPLES = 100_000
SIGMAS = 5.0  # a right estimator leaves this band once in 1.7 million comparisons


class Large(NamedTuple):
    """Log-probs over a full-size vocabulary, the tokens sampled from p and the most likely ones."""

    log_p_V: torch.Tensor
    log_q_V: torch.Tensor
    sampled_T: torch.Tensor
    head_k: torch.Tensor


@pytest.fixture(scope="module")
def large() -> Large:
    generator = torch.Generator().manual_seed(0)
    logits_V = 3.5 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    noise_V = 0.2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    log_p_V, log_q_V = logits_V.log_softmax(0), (logits_V + noise_V).log_softmax(0)
    cumulative_V = log_p_V.exp().cumsum(0)
    uniform_T = torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64)
    sampled_T = torch.searchsorted(cumulative_V, uniform_T * cumulative_V[-1])
    return Large(log_p_V, log_q_V, sampled_T, log_p_V.topk(K).indices)


def along(large: Large, name: str, gradient: str, direction_V: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value per sample, and its derivative along a direction of the logits: d log p_v = u_v - p . u."""
    slope_V = direction_V - large.log_p_V.exp() @ direction_V
    step_T = torch.zeros(NUM_SAMPLES, dtype=torch.float64, requires_grad=True)
    log_prob_T = large.log_p_V[large.sampled_T] + step_T * slope_V[large.sampled_T]
    log_p_Tk = large.log_p_V[large.head_k] + step_T[:, None] * slope_V[large.head_k]
    log_q_Tk = large.log_q_V[large.head_k].expand(NUM_SAMPLES, -1)
    in_S_T = torch.isin(large.sampled_T, large.head_k)
    kl_T = TOPK_KL[name](log_p_Tk, log_q_Tk, log_prob_T, large.log_q_V[large.sampled_T], in_S_T, gradient=gradient)
    return kl_T.detach(), torch.autograd.grad(kl_T.sum(), step_T)[0]


def sigmas_off(sample_T: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of the sample mean from `expected` in standard errors of that mean."""
    return ((sample_T.mean() - expected).abs() / (sample_T.std() / NUM_SAMPLES**0.5)).item()


@pytest.mark.parametrize("name", TOPK_KL)
def test_expectation_at_full_size_by_sampling(name: str, large: Large) -> None:
    """p has about half of its mass outside the head. The bands are 5 standard errors of 100,000 samples."""
    logits_V = large.log_p_V.clone().requires_grad_()
    true_value = exact(name, logits_V, large.log_q_V)
    true_V = gradient_of(true_value, logits_V)
    mass_V = gradient_of(logits_V.softmax(0)[large.head_k].sum(), logits_V)
    random_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for direction_V in (mass_V / mass_V.norm(), true_V / true_V.norm(), random_V):
        value_T, corrected_T = along(large, name, "corrected", direction_V)
        _, published_T = along(large, name, "published", direction_V)
        assert sigmas_off(value_T, true_value.detach()) < SIGMAS
        assert sigmas_off(corrected_T, true_V @ direction_V) < SIGMAS
        assert sigmas_off(published_T, (true_V + BIAS_SIGN[name] * mass_V) @ direction_V) < SIGMAS
    _, published_T = along(large, name, "published", mass_V / mass_V.norm())
    assert sigmas_off(published_T, true_V @ mass_V / mass_V.norm()) > 10 * SIGMAS
