"""The output head in chunks of tokens: [tokens, vocabulary] is never held whole.

One pass over a chunk's logits z (already divided by the temperature) gives everything that a loss needs of the
distribution p = softmax(z). The backward computes the logits again, chunk by chunk (on a CPU those beyond KEPT_BYTES),
and uses closed forms:

    d log p_y / d z_v = 1[v = y] - p_v         the label, and every token of `index_Nk`
    d H / d z_v       = -p_v (log p_v + H)     entropy
    d KL / d z_v                               `ExactKL.logit_gradient`

so that it needs three [chunk, vocabulary] tensors at most without an exact KL, and adds the head's gradient in place.
Matrix products take their inputs in `HeadRequest.dtype` and accumulate in float32, and everything from the logits on is
float32 (or float64), whatever format the decoder ran in. bfloat16 inputs lose nothing in the forward pass when the
decoder and its weights are bfloat16 anyway; in the backward pass they round the gradient of the logits. A CPU
multiplies bfloat16 only into bfloat16: there logits and weight gradients are products of the same numbers in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from verl.algorithms.kl import ExactKL
from verl.algorithms.log_probs import entropy
from verl.engine.device.runtime import kind_of, linear, matmul

SHORT = (torch.bfloat16, torch.float16)
CHUNK_BYTES = {"cuda": 512 * 2**20, "cpu": 8 * 2**20}  # of float32 logits: keeps a GPU busy, fits a CPU's cache
KEPT_BYTES = {"cpu": 64 * 2**20}  # of log-probs for the backward: a CPU takes far longer to compute them than to read
BLOCK = 2048  # rows of a 16-bit head that a CPU turns into float32 at a time, so that they stay in its cache
SMALLEST_CHUNK = 64  # tokens: smaller chunks mostly read the head's weights


class Head(NamedTuple):
    """Output projection: `weight_VH` and an optional `bias_V`."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None = None

    def cast(self, dtype: torch.dtype) -> Head:
        """The head with weights in `dtype` and the bias in float32; float64 stays float64."""
        weight_VH, bias_V = self
        if weight_VH.dtype != torch.float64:
            weight_VH = weight_VH.to(dtype)
        if bias_V is not None and bias_V.dtype != torch.float64:
            bias_V = bias_V.float()
        return Head(weight_VH, bias_V)

    def log_probs(self, hidden_NH: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, V] log-softmax of the logits over `temperature`, in float32 or float64."""
        hidden_NH = hidden_NH.to(self.weight_VH.dtype)
        if self.weight_VH.dtype not in SHORT:
            logits_NV = linear(hidden_NH, self.weight_VH, self.bias_V)
        else:
            logits_NV = self._short_logits(hidden_NH)
            logits_NV += 0.0 if self.bias_V is None else self.bias_V
        return logits_NV.div_(temperature).log_softmax(-1)

    def _short_logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        if multiplies_short(hidden_NH):
            return product(hidden_NH, self.weight_VH.T)
        hidden_NH = hidden_NH.float()
        logits_NV = hidden_NH.new_empty(len(hidden_NH), len(self.weight_VH))
        for logits_Nb, weight_bH in zip(logits_NV.split(BLOCK, -1), self.weight_VH.split(BLOCK), strict=True):
            logits_Nb.copy_(linear(hidden_NH, weight_bH.float()))
        return logits_NV


def multiplies_short(tensor: torch.Tensor) -> bool:
    """Whether the tensor's device multiplies 16-bit inputs into float32."""
    return kind_of(tensor.device) == "cuda"


def product(left_AB: torch.Tensor, right_BC: torch.Tensor, add_to_AC: torch.Tensor | None = None) -> torch.Tensor:
    """The product of two matrices of one dtype, accumulated in float32 (or float64); added in place to `add_to_AC` if
    that is given.
    """
    if left_AB.dtype in SHORT and not multiplies_short(left_AB):
        left_AB, right_BC = left_AB.float(), right_BC.float()
    if left_AB.dtype not in SHORT:
        product_AC = matmul(left_AB, right_BC)
        return product_AC if add_to_AC is None else add_to_AC.add_(product_AC)
    if add_to_AC is None:
        return torch.mm(left_AB, right_BC, out_dtype=torch.float32)
    return torch.addmm(add_to_AC, left_AB, right_BC, out_dtype=torch.float32, out=add_to_AC)


def rounded_product(left_AB: torch.Tensor, right_BC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of two matrices of one dtype, accumulated in float32 (or float64) and then rounded to `dtype`."""
    if left_AB.dtype == dtype and not multiplies_short(left_AB):
        return matmul(left_AB, right_BC)  # a CPU adds up in float32 and rounds once by itself
    return product(left_AB, right_BC).to(dtype)


def default_chunk(vocabulary: int, device_type: str) -> int:
    """Number of tokens whose float32 logits fill CHUNK_BYTES."""
    return max(SMALLEST_CHUNK, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (4 * vocabulary))


class AnchorView(NamedTuple):
    """The anchor as an exact KL reads it: its hidden states at the same tokens, its head, and the formula."""

    hidden_NH: torch.Tensor
    head: Head
    divergence: ExactKL


class HeadRequest(NamedTuple):
    """The statistics of N tokens' distributions that are requested. Only `label_N` and `temperature` are required.

    chunk_tokens: tokens per chunk; None: `default_chunk`.
    entropy_gradient: False computes the entropy for reporting only.
    index_Nk: int64 ids whose log-probs are requested too.
    top_k: how many of the most likely tokens are requested, with their log-probs. Not together with `index_Nk`.
    anchor: the distribution that the exact KL compares with.
    dtype: number format of the inputs of the head's matrix products.
    """

    label_N: torch.Tensor
    temperature: float
    chunk_tokens: int | None = None
    entropy_gradient: bool = True
    index_Nk: torch.Tensor | None = None
    top_k: int = 0
    anchor: AnchorView | None = None
    dtype: torch.dtype = torch.float32

    def part(self, span: slice) -> HeadRequest:
        """The request for the tokens of `span`; the anchor stays as it is."""
        index_Nk = None if self.index_Nk is None else self.index_Nk[span]
        return self._replace(label_N=self.label_N[span], index_Nk=index_Nk)

    def spans(self, vocabulary: int) -> Iterator[slice]:
        """The chunks of tokens, one at least."""
        size = self.chunk_tokens or default_chunk(vocabulary, kind_of(self.label_N.device))
        return (slice(start, start + size) for start in range(0, max(1, len(self.label_N)), size))


class TokenStats(NamedTuple):
    """Per token: log-prob of the label, entropy (nats), exact KL, log-probs at ids [N, k]; None where not requested."""

    log_prob_N: torch.Tensor
    entropy_N: torch.Tensor
    kl_N: torch.Tensor | None = None
    log_prob_Nk: torch.Tensor | None = None
    index_Nk: torch.Tensor | None = None


def token_stats(hidden_NH: torch.Tensor, head: Head, request: HeadRequest) -> TokenStats:
    """The requested statistics of tokens with the last hidden states `hidden_NH`; gradient to these and to the head.

    Without tokens the result is empty but still depends on the head's weights, so that a backward gives them a zero
    gradient. Raises ValueError for `top_k` beside `index_Nk`.
    """
    if request.top_k and request.index_Nk is not None:
        raise ValueError("request log-probs at one set of ids: either those of index_Nk or the top_k most likely ones")
    weight_VH, bias_V = head.cast(request.dtype)
    if request.anchor is not None:  # once for all chunks: a copy is as large as the head
        anchor_head = request.anchor.head.cast(request.dtype)
        request = request._replace(anchor=request.anchor._replace(head=anchor_head))
    return TokenStats(*_ChunkedHead.apply(hidden_NH, weight_VH, bias_V, request))


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, request: HeadRequest
    ) -> tuple[torch.Tensor | None, ...]:
        head = Head(weight_VH, bias_V)
        chunks: list[TokenStats] = []
        room = KEPT_BYTES.get(kind_of(hidden_NH.device), 0) if ctx.needs_input_grad[0] else 0
        ctx.kept = []  # log-probs of the first chunks, if there will be a backward
        for span in request.spans(len(weight_VH)):
            log_p_CV = head.log_probs(hidden_NH[span], request.temperature)
            chunks.append(_chunk_stats(log_p_CV, request, span))
            if (room := room - log_p_CV.nbytes) >= 0:
                ctx.kept.append(log_p_CV)
            del log_p_CV
        joined: list[Any] = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
        stats = TokenStats(*joined)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, stats.entropy_N, stats.kl_N)
        ctx.request = request
        if stats.index_Nk is not None:
            ctx.request = request._replace(index_Nk=stats.index_Nk)
            ctx.mark_non_differentiable(stats.index_Nk)
        return tuple(stats)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, entropy_N, kl_N = ctx.saved_tensors
        request: HeadRequest = ctx.request
        outer = TokenStats(*grads)
        head = Head(weight_VH, bias_V)
        stats = TokenStats(outer.log_prob_N, entropy_N, kl_N)
        hidden_grad_NH = torch.empty_like(hidden_NH)
        sum_dtype = torch.float32 if weight_VH.dtype in SHORT else weight_VH.dtype  # products are added up in it
        weight_grad_VH = torch.zeros_like(weight_VH, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        bias_grad_V = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
        for span in request.spans(len(weight_VH)):
            log_p_CV = ctx.kept.pop(0) if ctx.kept else head.log_probs(hidden_NH[span], request.temperature)
            logit_grad_CV = _logit_gradient(log_p_CV, request, span, stats, outer)
            del log_p_CV
            if bias_grad_V is not None:
                bias_grad_V += logit_grad_CV.sum(0)
            logit_grad_CV = logit_grad_CV.to(weight_VH.dtype)
            hidden_grad_NH[span] = rounded_product(logit_grad_CV, weight_VH, hidden_NH.dtype)
            if weight_grad_VH is not None:
                product(logit_grad_CV.T, hidden_NH[span].to(weight_VH.dtype), add_to_AC=weight_grad_VH)
        return hidden_grad_NH, weight_grad_VH, bias_grad_V, None


def _chunk_stats(log_p_CV: torch.Tensor, request: HeadRequest, span: slice) -> TokenStats:
    index_Ck = None if request.index_Nk is None else request.index_Nk[span]
    if index_Ck is None and request.top_k:
        index_Ck = log_p_CV.topk(min(request.top_k, log_p_CV.shape[-1]), dim=-1).indices
    return TokenStats(
        log_p_CV.gather(-1, request.label_N[span, None]).squeeze(-1),
        entropy(log_p_CV),
        None if request.anchor is None else request.anchor.divergence.value(log_p_CV, _anchor(request, span)),
        None if index_Ck is None else log_p_CV.gather(-1, index_Ck),
        index_Ck if request.top_k else None,
    )


def _logit_gradient(
    log_p_CV: torch.Tensor, request: HeadRequest, span: slice, stats: TokenStats, outer: TokenStats
) -> torch.Tensor:
    """[C, V] gradient of the loss with respect to the undivided logits. Overwrites `log_p_CV`."""
    # Every log-prob that was given out takes its gradient times p from all logits.
    label_grad_C1 = outer.log_prob_N[span, None]
    total_C1 = label_grad_C1
    if request.index_Nk is not None and outer.log_prob_Nk is not None:
        total_C1 = total_C1 + outer.log_prob_Nk[span].sum(-1, keepdim=True)
    grad_CV = log_p_CV.exp()

    # The exact KL comes before the entropy, which overwrites the log-probs to save a tensor of this size.
    exact_CV = None
    if request.anchor is not None and outer.kl_N is not None and stats.kl_N is not None:
        exact_CV = request.anchor.divergence.logit_gradient(log_p_CV, _anchor(request, span), stats.kl_N[span])
        exact_CV *= outer.kl_N[span, None]
    if request.entropy_gradient:
        entropy_grad_C1 = outer.entropy_N[span, None]
        constant_C1 = total_C1 + entropy_grad_C1 * stats.entropy_N[span, None]
        grad_CV.mul_(log_p_CV.mul_(-entropy_grad_C1).sub_(constant_C1))
    else:
        grad_CV.mul_(-total_C1)

    # The terms with 1[v = y], at the labels and at the other requested ids.
    grad_CV.scatter_add_(-1, request.label_N[span, None], label_grad_C1)
    if request.index_Nk is not None and outer.log_prob_Nk is not None:
        grad_CV.scatter_add_(-1, request.index_Nk[span], outer.log_prob_Nk[span])
    if exact_CV is not None:
        grad_CV += exact_CV
    return grad_CV.div_(request.temperature)


@torch.no_grad()
def _anchor(request: HeadRequest, span: slice) -> torch.Tensor:
    assert request.anchor is not None
    return request.anchor.head.log_probs(request.anchor.hidden_NH[span], request.temperature)
