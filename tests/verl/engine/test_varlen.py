"""Attention inside packed rows: against its definition, through whole models, and the call of the CUDA kernel."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest
import torch
from engine_cases import CPU, VOCABULARY, log_softmax_rows, make_batch, make_engine, relative_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import varlen as library
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl.engine import varlen
from verl.engine.batching import Layout, ModelInput, PackedRows, model_input
from verl.engine.device.runtime import cpu_stands_for
from verl.engine.hf_model import head_size
from verl.engine.model import CausalModel, attention_cost, layout_of
from verl.errors import ConfigError
from verl.protocol import TrainBatch

LENGTHS = (5, 1, 17, 9)
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    "gpt2": {"n_positions": 128},
    "llama": {"num_key_value_heads": 2, "intermediate_size": 64},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 64, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 64, "sliding_window": 7, "head_dim": 8},
    "olmo2": {"intermediate_size": 64},
    "gpt_neox": {"intermediate_size": 64},
    "gemma4_text": {  # heads of 8 values in the first layer, of 16 in the second
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "sliding_window": 7,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}

EXPERTS = {"num_key_value_heads": 2, "intermediate_size": 64, "num_local_experts": 4}
SINKS = EXPERTS | {"head_dim": 8, "sliding_window": 7, "pad_token_id": None}
QWEN2_MOE_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}


def tiny(family: str, **settings: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SMALL, **FAMILIES.get(family, {}), **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # far from uniform attention
    return model


def defined(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], window: int | None
) -> torch.Tensor:
    """[1, T, heads, D] float64: softmax over the allowed keys, written out for the whole [T, T] square."""
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position_T = torch.arange(len(row_T))
    return masked_softmax(query, key, value, row_T, row_T, position_T[:, None] - position_T, window)


def masked_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_Q: torch.Tensor,
    row_K: torch.Tensor,
    distance_QK: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    seen_QK = (row_Q[:, None] == row_K) & (distance_QK >= 0) & (distance_QK < (window or len(row_K)))
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~seen_QK, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def packed_tensors(value_size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (2, 8), (2, value_size)]
    return [torch.randn(1, heads, sum(LENGTHS), size, generator=generator) for heads, size in shapes]


def kernel_by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **options: object) -> object:
    """What torch's documentation says the CUDA kernel computes; the call must fit its signature."""
    bound = inspect.signature(library.varlen_attn).bind(q, k, v, *args, **options)
    bound.apply_defaults()
    given = bound.arguments
    assert given["enable_gqa"] is (q.shape[1] != k.shape[1]) and q.shape[-1] == k.shape[-1] == v.shape[-1]
    rows, positions = [], []
    for name, most in (("cu_seq_q", "max_q"), ("cu_seq_k", "max_k")):
        lengths = given[name].diff()
        assert given[name].dtype is torch.int32 and given[name][0] == 0 and given[most] == int(lengths.max())
        ends = given["cu_seq_k"].diff()  # a row's queries are the last of its keys
        positions.append(torch.cat([torch.arange(int(e - n), int(e)) for n, e in zip(lengths, ends, strict=True)]))
        rows.append(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
    left, right = given["window_size"]
    assert right == 0  # causal
    scaled_q = q * (given["scale"] * q.shape[-1] ** 0.5)
    tensors = (x.transpose(0, 1)[None] for x in (scaled_q, k, v))
    distance = positions[0][:, None] - positions[1]
    return masked_softmax(*tensors, *rows, distance, None if left == -1 else left + 1)[0].to(q.dtype)


@pytest.mark.parametrize("window", [None, 4, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_do_not_see_each_other(
    window: int | None, by_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_kernel:
        monkeypatch.setattr(varlen, "_kernel_takes", lambda *_: True)
        monkeypatch.setattr(varlen, "varlen_attn", kernel_by_definition)
    tensors = [tensor.to(dtype).requires_grad_() for tensor in packed_tensors(value_size=6)]
    rows = PackedRows.of(LENGTHS, CPU)
    found, _ = varlen.varlen_attention(
        torch.nn.Module(), *tensors, None, scaling=8**-0.5, sliding_window=window, **rows.attention_arguments()
    )
    wanted = defined(*tensors, LENGTHS, window)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found.double(), wanted, **tolerance)

    # The gradients, too: of every output by another weight.
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    of_found = torch.autograd.grad((found.double() * weight).sum(), tensors)
    for one, other in zip(of_found, torch.autograd.grad((wanted * weight).sum(), tensors), strict=True):
        torch.testing.assert_close(one.double(), other.double(), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_kernel_of_the_cpu_is_asked(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows always, short rows in float32 only: in bfloat16 two products are faster."""
    asked = []
    attend = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", lambda q, *a, **o: asked.append(q) or attend(q, *a, **o)
    )
    lengths = (varlen.MASKED_LENGTH, varlen.MASKED_LENGTH + 1)
    query, key = torch.randn(2, 1, 2, sum(lengths), 8).to(dtype)
    rows = PackedRows.of(lengths, CPU)
    found, _ = varlen.varlen_attention(torch.nn.Module(), query, key, key, None, **rows.attention_arguments())
    assert [q.shape[2] for q in asked] == [n for n in lengths if dtype is torch.float32 or n > varlen.MASKED_LENGTH]
    torch.testing.assert_close(found.double(), defined(query, key, key, lengths, None), rtol=0.02, atol=0.02)


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    varlen._say_slow.cache_clear()
    with FakeTensorMode(), caplog.at_level(logging.WARNING):

        def taken(dtype: torch.dtype, head_size: int, device: str = "cuda") -> bool:
            return varlen._kernel_takes(torch.device(device), dtype, head_size)

        assert taken(torch.bfloat16, 128) and taken(torch.float16, 256)
        assert not taken(torch.bfloat16, 64, "cpu") and not caplog.records
        assert not taken(torch.float32, 64)
        assert "row by row" in caplog.text
        assert not taken(torch.bfloat16, 264) and not taken(torch.bfloat16, 60)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not taken(torch.bfloat16, 128)


def test_the_kernel_has_the_shapes_that_models_expect() -> None:
    """torch's own description of the operator and its backward on fake tensors: nothing is computed. Keys of shared
    prefixes are more than the queries, and lie as the others do.
    """
    with FakeTensorMode():
        query, key = (torch.empty(1, 30, h, 64, dtype=torch.bfloat16).transpose(1, 2) for h in (14, 2))
        query.requires_grad_()
        key.requires_grad_()
        starts, shared = (torch.empty(5, dtype=torch.int32) for _ in range(2))
        gathered = key.transpose(1, 2)[:, torch.empty(44, dtype=torch.int64)].transpose(1, 2)
        assert gathered[0].transpose(0, 1).is_contiguous() and key[0].transpose(0, 1).is_contiguous()
        found = varlen._by_kernel(query, gathered, gathered, (starts, 17), (shared, 24), 0.125, None)
        found.sum().backward()
    assert found.shape == (1, 30, 14, 64) and found.dtype is torch.bfloat16
    assert query.grad is not None and query.grad.shape == query.shape
    assert key.grad is not None and key.grad.shape == key.shape


def log_probs_and_gradient(model: CausalModel, inputs: ModelInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a loss that weighs the selected tokens differently."""
    stats = model(inputs, 1.0)
    model.zero_grad()
    (stats.log_prob_N * torch.linspace(-1, 1, len(stats.log_prob_N))).sum().backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return stats.log_prob_N.detach(), gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_models_agree_with_padded_ones(family: str) -> None:
    batch = make_batch(6)
    model = CausalModel(tiny(family), head_chunk_tokens=None)
    results = []
    for packed in (False, True):
        layout = layout_of([model.model], remove_padding=packed)
        assert layout.packed is packed
        results.append(log_probs_and_gradient(model, model_input(batch, CPU, layout)))
    (padded_N, padded), (packed_N, gradient) = results
    torch.testing.assert_close(packed_N, padded_N, rtol=1e-5, atol=1e-5)
    assert relative_error(gradient, padded) < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("falcon", {}, "does not let its attention be chosen"),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}, "caps its attention logits"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "intermediate_size": 64},
            "has layers of type conv",
        ),
        ("gpt_oss", SINKS, "has attention sinks"),
        ("phimoe", EXPERTS | {"sliding_window": 7}, "has a sliding window, of which it tells its attention by a mask"),
        ("qwen2_moe", EXPERTS | QWEN2_MOE_WINDOW, "has a sliding window, of which it tells its attention by a mask"),
    ],
)
def test_a_model_that_cannot_be_packed_is_padded_and_named(
    family: str, settings: dict[str, object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, able = tiny(family, **settings), tiny("llama")
    with caplog.at_level(logging.WARNING):
        assert not layout_of([able, other], remove_padding=True).packed
    assert f"{type(other).__name__} {why}" in caplog.text
    assert able.config._attn_implementation == "sdpa"  # both are given the same rows
    caplog.clear()
    assert not layout_of([other], remove_padding=False).packed and not caplog.records


@pytest.mark.parametrize(("family", "settings"), [("gpt_oss", SINKS), ("phimoe", EXPERTS | {"sliding_window": 7})])
def test_its_log_probs_are_those_of_its_own_attention(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    """PyTorch's attention has no sinks, so that transformers has none but the model's own for GPT-OSS."""
    tiny(family, **settings).save_pretrained(tmp_path / "model")
    engine, batch = make_engine(str(tmp_path / "model"), tmp_path / "run"), make_batch()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    rows = batch.tokens["ids"].split(batch.lengths_B.tolist())
    with torch.no_grad():
        logits = [plain(input_ids=ids[None], use_cache=False).logits[0] for ids in rows]
    expected_T = log_softmax_rows(logits, 1.0).gather(-1, batch.tokens["ids"][:, None]).squeeze(-1)
    mask_T, found_T = batch.tokens["loss_mask"], engine.log_probs(batch, 1.0).tokens["log_prob"]
    torch.testing.assert_close(found_T[mask_T], expected_T[mask_T], atol=1e-4, rtol=1e-5)


def test_heads_of_different_sizes_count_as_the_largest() -> None:
    """4 of 16 values and 2 keys of that; a row costs L + 4 x 16 x 2 layers / weights of a layer L^2."""
    model = tiny("gemma4_text")
    weights = sum(parameter.numel() for layer in model.model.layers for parameter in layer.parameters())
    assert attention_cost(model) == 4 * 16 * 2 / weights
    assert head_size(AutoConfig.for_model("llama", **SMALL)) == 8


def test_the_attention_in_use_is_named() -> None:
    """For the line in the log at the start of a run; heads here have 16 values."""
    model = tiny("llama")
    assert varlen.attention_in_words(model, CPU, torch.float32) == "sdpa of transformers"
    assert layout_of([model], remove_padding=True).packed
    with cpu_stands_for("cuda"):
        assert varlen.attention_in_words(model, CPU, torch.bfloat16) == "PyTorch's variable-length kernel"
        slow = varlen.attention_in_words(model, CPU, torch.float32)
    assert slow == varlen.attention_in_words(model, CPU, torch.float32)
    assert varlen.attention_in_words(model, CPU, torch.bfloat16) == f"{slow}, rows of up to 512 tokens by products"
    assert slow == "PyTorch's scaled_dot_product_attention, row by row"


def test_padded_rows_are_refused_by_a_packed_model() -> None:
    model = CausalModel(tiny("llama"), head_chunk_tokens=None)
    assert layout_of([model.model], remove_padding=True).packed
    with pytest.raises(ConfigError, match="where its rows begin"):
        model(model_input(make_batch(2), CPU, Layout(packed=False)), 1.0)


@pytest.mark.parametrize("name", varlen.NOT_IMPLEMENTED)
def test_what_is_not_implemented_is_refused(name: str) -> None:
    rows = PackedRows.of(LENGTHS, CPU).attention_arguments()
    given = {"attention_mask": None, name: torch.zeros(1)}
    with pytest.raises(ConfigError, match=f"asks its attention for {name}"):
        varlen.varlen_attention(torch.nn.Module(), *packed_tensors(), **given, **rows)


def test_the_choice_is_not_saved(tmp_path: Path) -> None:
    model = tiny("llama")
    assert layout_of([model], remove_padding=True).packed
    model.save_pretrained(tmp_path)
    assert "varlen" not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_rows_begin_where_the_ones_before_end() -> None:
    rows = PackedRows.of([3, 0, 2], CPU)
    assert rows.lengths == (3, 2) and rows.starts.tolist() == [0, 3, 5] and rows.starts.dtype is torch.int32
    empty = TrainBatch(torch.zeros(0, dtype=torch.int64), {k: v[:0] for k, v in make_batch(1).tokens.items()})
    filler = model_input(empty, CPU, Layout(packed=True))
    assert filler.packed is not None and filler.packed.lengths == (1,) and filler.ids_BL.shape == (1, 1)
    assert len(filler.select_N) == 0
