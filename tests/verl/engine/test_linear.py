"""Linear layers by oneDNN give what PyTorch's own give, and their gradients are those of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from verl.engine import linear as module
from verl.engine.linear import OneDnnLinear, linear, matmul, use_onednn


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
