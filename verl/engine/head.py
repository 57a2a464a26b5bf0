"""The output head in chunks of tokens: [tokens, vocabulary] is never held for more than one chunk.

One pass over a chunk's logits z (already divided by the temperature) gives everything that a loss asks of the
distribution p = softmax(z). The backward computes the logits again, chunk by chunk, and uses closed forms:

    d log p_y / d z_v = 1[v = y] - p_v         the label, and every token of `index_Nk`
    d H / d z_v       = -p_v (log p_v + H)     entropy
    d KL / d z_v                               `ExactKL.logit_gradient`

so that it needs three [chunk, vocabulary] tensors at most without an exact KL, and adds the head's gradient in place.
Everything is float32 (or float64) from the head's product on, whatever format the decoder ran in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from verl.algorithms.entropy import entropy
from verl.algorithms.kl import ExactKL

SMALLEST_CHUNK = 64  # tokens
CHUNKS = 64  # by default a chunk holds no more than this part of the tokens, unless that is less than the smallest


class Head(NamedTuple):
    """Output projection: `weight_VH` and an optional `bias_V`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None

    def precise(self) -> Head:
        """The same in float32, or as it is if it is float64."""
        return Head(_precise(self.weight_VH), None if self.bias_V is None else _precise(self.bias_V))

    def log_probs(self, hidden_NH: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, V] log-softmax of the logits over `temperature`."""
        logits_NV = functional.linear(_precise(hidden_NH).to(self.weight_VH.dtype), self.weight_VH, self.bias_V)
        return logits_NV.div_(temperature).log_softmax(-1)


class AnchorView(NamedTuple):
    """What an exact KL needs of the anchor: its hidden states at the same tokens, its head, and the formula."""

    hidden_NH: torch.Tensor
    head: Head
    divergence: ExactKL


class Question(NamedTuple):
    """What is asked of the distributions of N tokens. Only `label_N` and `temperature` have to be given.

    chunk_tokens: tokens per chunk; None: a 64th of N, at least 64.
    entropy_gradient: False computes the entropy for reporting only.
    index_Nk: int64 ids whose log-probs are wanted too.
    top_k: the ids of that many most likely tokens are wanted; without `index_Nk`, their log-probs too.
    anchor: what the exact KL is taken to.
    """

    label_N: torch.Tensor
    temperature: float
    chunk_tokens: int | None = None
    entropy_gradient: bool = True
    index_Nk: torch.Tensor | None = None
    top_k: int = 0
    anchor: AnchorView | None = None

    def spans(self) -> Iterator[slice]:
        num_tokens = len(self.label_N)
        size = self.chunk_tokens or max(SMALLEST_CHUNK, -(-num_tokens // CHUNKS))
        return (slice(start, start + size) for start in range(0, max(1, num_tokens), size))


class TokenStats(NamedTuple):
    """Per token: log-prob of the label, entropy (nats), exact KL, log-probs at ids [N, k]; None where not asked for."""

    log_prob_N: torch.Tensor
    entropy_N: torch.Tensor
    kl_N: torch.Tensor | None = None
    log_prob_Nk: torch.Tensor | None = None
    index_Nk: torch.Tensor | None = None


def token_stats(hidden_NH: torch.Tensor, head: Head, question: Question) -> TokenStats:
    """Answers `question` for the tokens whose last hidden states are `hidden_NH`; gradient to these and to the head.

    With no token at all the result is empty but still hangs on the head's weights, so that a backward gives them a
    zero gradient. Raises ValueError for `top_k` with a gradient: find the ids first, then ask for their log-probs.
    """
    if question.top_k and torch.is_grad_enabled():
        raise ValueError("top_k finds ids, which have no gradient: call it under torch.no_grad()")
    weight_VH, bias_V = head.precise()
    if question.anchor is not None:  # once for all chunks: the copy is as large as the head
        question = question._replace(anchor=question.anchor._replace(head=question.anchor.head.precise()))
    return TokenStats(*_ChunkedHead.apply(hidden_NH, weight_VH, bias_V, question))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, question: Question
    ) -> tuple[torch.Tensor | None, ...]:
        head = Head(weight_VH, bias_V)
        stats = _joined([_answer(hidden_NH[span], head, question, span) for span in question.spans()])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, stats.entropy_N, stats.kl_N)
        ctx.question = question
        if stats.index_Nk is not None:
            ctx.mark_non_differentiable(stats.index_Nk)
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, entropy_N, kl_N = ctx.saved_tensors
        question: Question = ctx.question
        outer = TokenStats(*grads)
        head = Head(weight_VH, bias_V)
        stats = TokenStats(outer.log_prob_N, entropy_N, kl_N)
        hidden_grad_NH = torch.empty_like(hidden_NH)
        weight_grad_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        bias_grad_V = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        for span in question.spans():
            logit_grad_CV = _logit_gradient(hidden_NH[span], head, question, span, stats, outer)
            hidden_grad_NH[span] = (logit_grad_CV @ weight_VH).to(hidden_NH.dtype)
            if weight_grad_VH is not None:
                weight_grad_VH.addmm_(logit_grad_CV.T, hidden_NH[span].to(weight_VH.dtype))
            if bias_grad_V is not None:
                bias_grad_V += logit_grad_CV.sum(0)
        return hidden_grad_NH, weight_grad_VH, bias_grad_V, None


def _joined(chunks: list[TokenStats]) -> TokenStats:
    values: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
    return TokenStats(*values)


def _answer(hidden_CH: torch.Tensor, head: Head, question: Question, span: slice) -> TokenStats:
    log_p_CV = head.log_probs(hidden_CH, question.temperature)
    index_Ck = None if question.index_Nk is None else question.index_Nk[span]
    if index_Ck is None and question.top_k:
        index_Ck = log_p_CV.topk(min(question.top_k, log_p_CV.shape[-1]), dim=-1).indices
    return TokenStats(
        log_p_CV.gather(-1, question.label_N[span, None]).squeeze(-1),
        entropy(log_p_CV),
        None if question.anchor is None else question.anchor.divergence.value(log_p_CV, _anchor(question, span)),
        None if index_Ck is None else log_p_CV.gather(-1, index_Ck),
        index_Ck if question.top_k else None,
    )


def _logit_gradient(
    hidden_CH: torch.Tensor, head: Head, question: Question, span: slice, stats: TokenStats, outer: TokenStats
) -> torch.Tensor:
    """[C, V] gradient of the loss with respect to the undivided logits."""
    log_p_CV = head.log_probs(hidden_CH, question.temperature)
    label_grad_C1 = outer.log_prob_N[span, None]
    total_C1 = label_grad_C1
    if question.index_Nk is not None and outer.log_prob_Nk is not None:
        total_C1 = total_C1 + outer.log_prob_Nk[span].sum(-1, keepdim=True)
    grad_CV = log_p_CV.exp()
    exact_CV = None
    if question.anchor is not None and outer.kl_N is not None and stats.kl_N is not None:
        exact_CV = question.anchor.divergence.logit_gradient(log_p_CV, _anchor(question, span), stats.kl_N[span])
        exact_CV *= outer.kl_N[span, None]
    if question.entropy_gradient:
        entropy_grad_C1 = outer.entropy_N[span, None]
        constant_C1 = total_C1 + entropy_grad_C1 * stats.entropy_N[span, None]
        grad_CV.mul_(log_p_CV.mul_(-entropy_grad_C1).sub_(constant_C1))
    else:
        grad_CV.mul_(-total_C1)
    grad_CV.scatter_add_(-1, question.label_N[span, None], label_grad_C1)
    if question.index_Nk is not None and outer.log_prob_Nk is not None:
        grad_CV.scatter_add_(-1, question.index_Nk[span], outer.log_prob_Nk[span])
    if exact_CV is not None:
        grad_CV += exact_CV
    return grad_CV.div_(question.temperature)


@torch.no_grad()
def _anchor(question: Question, span: slice) -> torch.Tensor:
    assert question.anchor is not None
    return question.anchor.head.log_probs(question.anchor.hidden_NH[span], question.temperature)


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
