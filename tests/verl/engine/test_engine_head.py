"""The chunked head and linear layers by oneDNN, against whole logits, PyTorch's own and autograd in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from verl.algorithms.kl import EXACT_KL
from verl.engine import head as head_module
from verl.engine.device import runtime as module
from verl.engine.device.runtime import OneDnnLinear, linear, matmul, use_onednn
from verl.engine.head import AnchorView, Head, HeadRequest, TokenStats, default_chunk, product, token_stats

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

    def request(self, chunk: int | None, kl: str | None, **changes: object) -> HeadRequest:
        anchor = None if kl is None else AnchorView(self.anchor_hidden_NH, self.anchor_head, EXACT_KL[kl])
        return HeadRequest(self.label_N, TEMPERATURE, chunk, index_Nk=self.index_Nk, anchor=anchor)._replace(**changes)

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
    stats, expected = token_stats(case.hidden_NH, case.head, case.request(chunk, kl)), case.expected(kl)
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
    stats = token_stats(case.hidden_NH, case.head, case.request(3, None, entropy_gradient=False))
    gradients = torch.autograd.grad((stats.entropy_N * case.outer[1]).sum(), case.leaves)
    assert not any(gradient.any() for gradient in gradients)


def test_top_ids_are_the_most_likely_ones() -> None:
    case = Case()
    with torch.no_grad():
        stats = token_stats(case.hidden_NH, case.head, HeadRequest(case.label_N, TEMPERATURE, 3, top_k=TOP))
    assert stats.index_Nk is not None and stats.log_prob_Nk is not None
    log_p_NV = (case.hidden_NH @ case.weight_VH.T / TEMPERATURE).log_softmax(-1)
    torch.testing.assert_close(stats.log_prob_Nk, log_p_NV.topk(TOP).values.detach(), atol=1e-12, rtol=0)
    assert torch.equal(stats.index_Nk, log_p_NV.topk(TOP).indices)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_gradient_at_the_top_ids_is_that_at_given_ids(chunk: int) -> None:
    """To the last bit: the ids are found in the same pass, or known before."""
    case = Case(bias=True)
    found = token_stats(case.hidden_NH, case.head, HeadRequest(case.label_N, TEMPERATURE, chunk, top_k=TOP))
    request = HeadRequest(case.label_N, TEMPERATURE, chunk, index_Nk=found.index_Nk)
    given = token_stats(case.hidden_NH, case.head, request)
    gradients = [torch.autograd.grad(case.total(stats), case.leaves) for stats in (found, given)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    with pytest.raises(ValueError, match="at one set of ids"):
        token_stats(case.hidden_NH, case.head, request._replace(top_k=TOP))


def test_more_ids_than_the_vocabulary_has_are_all_of_it() -> None:
    case = Case()
    with torch.no_grad():
        stats = token_stats(case.hidden_NH, case.head, HeadRequest(case.label_N, TEMPERATURE, top_k=99))
    assert stats.log_prob_Nk is not None
    torch.testing.assert_close(stats.log_prob_Nk.exp().sum(-1), torch.ones(NUM, dtype=torch.float64))


def test_no_token_gives_the_head_a_zero_gradient() -> None:
    case = Case(bias=True)
    request = HeadRequest(case.label_N[:0], TEMPERATURE, index_Nk=case.index_Nk[:0])
    stats = token_stats(case.hidden_NH[:0], case.head, request)
    assert stats.log_prob_N.shape == (0,) and stats.log_prob_Nk is not None and stats.log_prob_Nk.shape == (0, TOP)
    stats.log_prob_N.sum().backward()
    assert case.weight_VH.grad is not None and not case.weight_VH.grad.any()


def test_half_precision_states_are_computed_in_float32() -> None:
    case = Case()
    hidden_NH = case.hidden_NH.detach().to(torch.bfloat16).requires_grad_()
    weight_VH = case.weight_VH.detach().to(torch.bfloat16).requires_grad_()
    stats = token_stats(hidden_NH, Head(weight_VH), HeadRequest(case.label_N, 1.0))
    assert stats.log_prob_N.dtype == torch.float32
    whole_N = (hidden_NH.float() @ weight_VH.float().T).log_softmax(-1)[torch.arange(NUM), case.label_N]
    torch.testing.assert_close(stats.log_prob_N, whole_N)
    stats.log_prob_N.sum().backward()
    assert hidden_NH.grad is not None and hidden_NH.grad.dtype == torch.bfloat16
    assert weight_VH.grad is not None and weight_VH.grad.dtype == torch.bfloat16


def test_bfloat16_factors_are_summed_in_float32() -> None:
    """Forward: the product of the rounded factors, not rounded again. Backward: the logits' gradient is, once."""
    case = Case(bias=True)
    hidden_NH, weight_VH, bias_V = (leaf.detach().bfloat16().requires_grad_() for leaf in case.leaves)
    anchor_head = Head(case.anchor_head.weight_VH.bfloat16())
    anchor = AnchorView(case.anchor_hidden_NH.bfloat16(), anchor_head, EXACT_KL["full_reverse"])
    request = HeadRequest(case.label_N, TEMPERATURE, 3, anchor=anchor, dtype=torch.bfloat16)
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden_NH, weight_VH, bias_V)]
    wide_anchor = anchor._replace(hidden_NH=anchor.hidden_NH.double(), head=Head(anchor.head.weight_VH.double()))
    results = []
    for leaves, asked in (
        ([hidden_NH, weight_VH, bias_V], request),
        (wide, request._replace(anchor=wide_anchor, dtype=torch.float64)),
    ):
        stats = token_stats(leaves[0], Head(*leaves[1:]), asked)
        loss = (stats.log_prob_N * case.outer[0] + stats.entropy_N * case.outer[1] + stats.kl_N).sum()
        results.append((stats, torch.autograd.grad(loss, leaves)))
    (short, short_gradients), (exact, gradients) = results
    for name in ("log_prob_N", "entropy_N", "kl_N"):
        assert getattr(short, name).dtype is torch.float32
        torch.testing.assert_close(getattr(short, name).double(), getattr(exact, name), rtol=2e-6, atol=2e-6)
    for found, wanted in zip(short_gradients, gradients, strict=True):
        assert found.dtype is torch.bfloat16
        assert (found.double() - wanted).norm() < 2**-7 * wanted.norm()


@pytest.mark.parametrize("room", [0, 3 * VOCABULARY * 8, 2**20], ids=["none", "one", "all"])
def test_kept_log_probs_change_no_bit_of_the_gradient(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a second backward, for which none are kept."""
    case = Case(bias=True)
    wanted = torch.autograd.grad(case.total(token_stats(case.hidden_NH, case.head, case.request(3, None))), case.leaves)
    monkeypatch.setitem(head_module.KEPT_BYTES, "cpu", room)
    total = case.total(token_stats(case.hidden_NH, case.head, case.request(3, None)))
    for keep_graph in (True, False):
        found = torch.autograd.grad(total, case.leaves, retain_graph=keep_graph)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_a_bfloat16_head_of_several_blocks() -> None:
    """Logits of bfloat16 factors are those in float64 within float32's precision, in the last, shorter block too."""
    vocabulary = 2 * head_module.BLOCK + 7
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(NUM, HIDDEN, generator=generator).bfloat16()
    head = Head(torch.randn(vocabulary, HIDDEN, generator=generator).bfloat16(), torch.randn(vocabulary).bfloat16())
    label_N = torch.tensor([0, 1, head_module.BLOCK - 1, head_module.BLOCK, *range(vocabulary - 3, vocabulary)])
    with torch.no_grad():
        found = token_stats(hidden_NH, head, HeadRequest(label_N, TEMPERATURE, dtype=torch.bfloat16))
        wide = Head(head.weight_VH.double(), torch.as_tensor(head.bias_V).double())
        wanted = token_stats(hidden_NH.double(), wide, HeadRequest(label_N, TEMPERATURE))
    torch.testing.assert_close(found.log_prob_N.double(), wanted.log_prob_N, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.entropy_N.double(), wanted.entropy_N, rtol=2e-6, atol=2e-6)


def test_on_cuda_short_factors_are_multiplied_into_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the head: the calls fit the installed operators, which only CUDA has."""
    calls = []

    def recorded(operator: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
        def call(*given: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
            arguments = {argument.name for argument in operator._schema.arguments}
            assert "out_dtype" in arguments and len(given) <= len(arguments) - 1 and (out is None or "out" in arguments)
            calls.append((str(operator).removeprefix("aten."), out_dtype))
            return (
                given[0] if out is not None else given[0].new_empty(len(given[0]), given[1].shape[1], dtype=out_dtype)
            )

        return call

    monkeypatch.setattr(torch, "mm", recorded(torch.ops.aten.mm.dtype))
    monkeypatch.setattr(torch, "addmm", recorded(torch.ops.aten.addmm.dtype_out))
    with FakeTensorMode():
        left, right = (torch.empty(4, 4, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        sums = torch.empty(4, 4, device="cuda")
        assert product(left, right).dtype is torch.float32
        assert product(left, right, add_to_AC=sums) is sums
    assert calls == [("mm.dtype", torch.float32), ("addmm.dtype_out", torch.float32)]


def test_a_chunk_is_counted_in_bytes() -> None:
    def sizes(num_tokens: int, vocabulary: int) -> list[int]:
        spans = HeadRequest(torch.zeros(num_tokens, dtype=torch.int64), 1.0).spans(vocabulary)
        return [len(range(num_tokens)[span]) for span in spans]

    assert sizes(150, 151_936) == [64, 64, 22]
    assert sizes(5000, 1024) == [2048, 2048, 904]  # 8 MiB of float32
    assert default_chunk(151_936, "cuda") == 883 and default_chunk(151_936, "cpu") == 64


@pytest.fixture(params=[True, False], ids=["onednn", "PyTorch's own"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch was built without oneDNN")
    monkeypatch.setattr(module, "onednn_is_faster", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("tokens", [(3, 7), (1, 130), (40,), (2, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_in_float64(faster: bool, tokens: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(*tokens, 24), (17, 24), *([(17,)] if bias else [])]
    exact = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]
    given = [tensor.detach().float().requires_grad_() for tensor in exact]
    expected, found = functional.linear(*exact), linear(*given)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    (expected * weights).sum().backward()
    (found * weights.float()).sum().backward()
    for one, other in zip(given, exact, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_formats_are_left_to_pytorch(faster: bool, dtype: torch.dtype) -> None:
    input, weight = torch.randn(5, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    assert torch.equal(linear(input, weight), functional.linear(input, weight))
    assert torch.equal(matmul(input, weight.T), input @ weight.T)


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (9, 5)])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_of_matrices_in_any_order_in_memory(faster: bool, rows: int, columns: int, transposed: bool) -> None:
    left, right = torch.randn(rows, 6), torch.randn(6, columns)
    if transposed:
        left, right = left.T.contiguous().T, right.T.contiguous().T
    torch.testing.assert_close(matmul(left, right), (left.double() @ right.double()).float())


def test_a_layer_that_is_frozen_hands_the_gradient_on(faster: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).requires_grad_(False)
    before = model(given := torch.randn(6, 4)).detach()
    use_onednn(model)
    assert [type(layer) for layer in model] == [OneDnnLinear, nn.ReLU, OneDnnLinear]
    torch.testing.assert_close(model(given.requires_grad_()), before)
    model(given).sum().backward()
    assert given.grad is not None and given.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in model.parameters())
