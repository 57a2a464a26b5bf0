"""Packed linear layers against the definition in float64, and a packed BERT against the plain one."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

from search_r1.search.dense.encoding.packed_linear import PackedLinear, pack_linear_layers
from search_r1.search.dense.encoding.precision import cpu_has_bf16

pytestmark = pytest.mark.skipif(not cpu_has_bf16(), reason="this CPU has no bfloat16, so encoders run in float32")


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (3, 7, 48), (2, 200, 48)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@torch.inference_mode()
def test_values_are_those_of_the_definition(shape: tuple[int, ...], bias: bool, activation: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(shape, dtype=torch.bfloat16)
    expected = inputs.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    if activation == "gelu":
        expected = expected * 0.5 * (1 + torch.erf(expected / 2**0.5))
    found = PackedLinear(linear, activation)(inputs)  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    # one rounding to bfloat16 and the float32 sums before it; the GELU by tanh would differ by 4e-4
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@torch.inference_mode()
def test_a_packed_bert_computes_the_same(activation: str) -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2,
        hidden_act=activation, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = BertModel(config).eval()
    packed = BertModel(config).eval()
    packed.load_state_dict(plain.state_dict())
    packed.bfloat16()
    assert not pack_linear_layers(plain)  # of float32
    assert pack_linear_layers(packed)
    assert not [module for module in packed.modules() if type(module) is torch.nn.Linear]
    ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:] = 0
    found = packed(input_ids=ids, attention_mask=mask).last_hidden_state.float()
    expected = plain(input_ids=ids, attention_mask=mask).last_hidden_state
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], rtol=0, atol=0.04)  # of values of size 1
