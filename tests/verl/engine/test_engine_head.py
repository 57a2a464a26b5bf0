"""The chunked head against full logits and autograd in float64: values, gradients, chunks, what is not asked for."""

from __future__ import annotations

import pytest
import torch

from verl.algorithms.kl import EXACT_KL
from verl.engine.head import AnchorView, Head, Question, TokenStats, token_stats

NUM, HIDDEN, VOCABULARY, TOP = 7, 5, 11, 3
TEMPERATURE = 0.7


class Case:
    """Random hidden states, heads and questions, all float64."""

    def __init__(self, bias: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden_NH = random(NUM, HIDDEN).requires_grad_()
        self.weight_VH = random(VOCABULARY, HIDDEN).requires_grad_()
        self.bias_V = random(VOCABULARY).requires_grad_() if bias else None
        self.head = Head(self.weight_VH, self.bias_V)
        self.label_N = torch.randint(0, VOCABULARY, (NUM,), generator=generator)
        self.index_Nk = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:TOP] for _ in range(NUM)])
        self.anchor_hidden_NH, self.anchor_head = random(NUM, HIDDEN), Head(random(VOCABULARY, HIDDEN))
        self.outer = [random(NUM), random(NUM), random(NUM), random(NUM, TOP)]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in (self.hidden_NH, self.weight_VH, self.bias_V) if t is not None]

    def question(self, chunk: int | None, kl: str | None, **changes: object) -> Question:
        anchor = None if kl is None else AnchorView(self.anchor_hidden_NH, self.anchor_head, EXACT_KL[kl])
        return Question(self.label_N, TEMPERATURE, chunk, index_Nk=self.index_Nk, anchor=anchor)._replace(**changes)

    def expected(self, kl: str | None) -> TokenStats:
        """The same from whole logits, by autograd."""
        logits_NV = self.hidden_NH @ self.weight_VH.T + (0.0 if self.bias_V is None else self.bias_V)
        log_p_NV = (logits_NV / TEMPERATURE).log_softmax(-1)
        log_q_NV = (self.anchor_hidden_NH @ self.anchor_head.weight_VH.T / TEMPERATURE).log_softmax(-1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        kl_N = None
        if kl == "full_reverse":
            kl_N = (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
        elif kl == "full_forward":
            kl_N = (log_q_NV.exp() * (log_q_NV - log_p_NV)).sum(-1)
        rows = torch.arange(NUM)
        return TokenStats(log_p_NV[rows, self.label_N], entropy_N, kl_N, log_p_NV[rows[:, None], self.index_Nk])

    def total(self, stats: TokenStats) -> torch.Tensor:
        parts = zip(stats[:4], self.outer, strict=True)
        return torch.stack([(value * weight).sum() for value, weight in parts if value is not None]).sum()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kl", [None, "full_reverse", "full_forward"])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_values_and_gradients_are_those_of_whole_logits(chunk: int, kl: str | None, bias: bool) -> None:
    case = Case(bias)
    stats, expected = token_stats(case.hidden_NH, case.head, case.question(chunk, kl)), case.expected(kl)
    for value, wanted in zip(stats[:4], expected[:4], strict=True):
        assert (value is None) == (wanted is None)
        if value is not None:
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=0)
    found = torch.autograd.grad(case.total(stats), case.leaves)
    wanted_gradients = torch.autograd.grad(case.total(expected), case.leaves)
    for gradient, wanted in zip(found, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-11, rtol=0)


def test_entropy_for_reporting_has_no_gradient() -> None:
    case = Case()
    stats = token_stats(case.hidden_NH, case.head, case.question(3, None, entropy_gradient=False))
    gradients = torch.autograd.grad((stats.entropy_N * case.outer[1]).sum(), case.leaves)
    assert not any(gradient.any() for gradient in gradients)


def test_top_ids_are_the_most_likely_ones() -> None:
    case = Case()
    with torch.no_grad():
        stats = token_stats(case.hidden_NH, case.head, Question(case.label_N, TEMPERATURE, 3, top_k=TOP))
    assert stats.index_Nk is not None and stats.log_prob_Nk is not None
    log_p_NV = (case.hidden_NH @ case.weight_VH.T / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(stats.log_prob_Nk, log_p_NV.topk(TOP).values.detach(), atol=1e-12, rtol=0)
    assert torch.equal(stats.index_Nk, log_p_NV.topk(TOP).indices)
    with pytest.raises(ValueError, match="top_k finds ids"):
        token_stats(case.hidden_NH, case.head, Question(case.label_N, TEMPERATURE, 3, top_k=TOP))


def test_more_ids_than_the_vocabulary_has_are_all_of_it() -> None:
    case = Case()
    with torch.no_grad():
        stats = token_stats(case.hidden_NH, case.head, Question(case.label_N, TEMPERATURE, top_k=99))
    assert stats.log_prob_Nk is not None
    torch.testing.assert_close(stats.log_prob_Nk.exp().sum(-1), torch.ones(NUM, dtype=torch.float64))


def test_no_token_gives_the_head_a_zero_gradient() -> None:
    case = Case(bias=True)
    question = Question(case.label_N[:0], TEMPERATURE, index_Nk=case.index_Nk[:0])
    stats = token_stats(case.hidden_NH[:0], case.head, question)
    assert stats.log_prob_N.shape == (0,) and stats.log_prob_Nk is not None and stats.log_prob_Nk.shape == (0, TOP)
    stats.log_prob_N.sum().backward()
    assert case.weight_VH.grad is not None and not case.weight_VH.grad.any()


def test_half_precision_states_are_computed_in_float32() -> None:
    case = Case()
    hidden_NH = case.hidden_NH.detach().to(torch.bfloat16).requires_grad_()
    weight_VH = case.weight_VH.detach().to(torch.bfloat16).requires_grad_()
    stats = token_stats(hidden_NH, Head(weight_VH), Question(case.label_N, 1.0))
    assert stats.log_prob_N.dtype == torch.float32
    whole_N = (hidden_NH.float() @ weight_VH.float().T).log_softmax(-1)[torch.arange(NUM), case.label_N]
    torch.testing.assert_close(stats.log_prob_N, whole_N)
    stats.log_prob_N.sum().backward()
    assert hidden_NH.grad is not None and hidden_NH.grad.dtype == torch.bfloat16
    assert weight_VH.grad is not None and weight_VH.grad.dtype == torch.bfloat16


def test_a_chunk_is_a_64th_of_the_tokens_but_at_least_64() -> None:
    def sizes(num_tokens: int) -> list[int]:
        spans = Question(torch.zeros(num_tokens, dtype=torch.int64), 1.0).spans()
        return [len(range(num_tokens)[span]) for span in spans]

    assert sizes(150) == [64, 64, 22]
    assert sizes(4096) == [64] * 64
    assert sizes(64 * 1000) == [1000] * 64
