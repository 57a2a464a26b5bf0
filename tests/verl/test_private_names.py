"""The private names of PyTorch, transformers and vLLM that the project uses exist in the installed versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor, _sharding_prop
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from verl.engine.device import torch_private as engine_torch
from verl.engine.transformers_private import attention_implementation, keeps_state, layer_class_names
from verl.planning.dry_run import torch_private as planning_torch

PARAMETERS = [
    (engine_torch.pin_memory, ["data_ptr", "size"]),
    (engine_torch.unpin_memory, ["data_ptr"]),
    (engine_torch.compute_local_shape_and_global_offset, ["global_shape", "mesh", "placements", "skip_offset"]),
    (FSDPModule._get_fsdp_state, ["self"]),
    (nn.Module._apply, ["self", "fn", "recurse"]),
    (torch._foreach_lerp_, None),  # compiled
    (_fsdp_param._chunk_with_empty, ["tensor", "num_chunks", "dim"]),
    (_sharding_prop._propagate_use_strided_shard_flag, ["op_strategy", "op_schema"]),
    (planning_torch.active_fake_mode, []),
    (planning_torch.FakeTensorMode.dispatch, ["self", "func", "types", "args", "kwargs"]),
    (planning_torch.CollectiveOp.get_comm_tensor_size, ["func", "res", "args", "kwargs"]),
    (planning_torch.tree_leaves, ["tree", "is_leaf"]),
    (PreTrainedModel._can_set_attn_implementation, []),
]


@pytest.mark.parametrize(("function", "expected"), PARAMETERS, ids=lambda value: getattr(value, "__name__", None))
def test_a_private_function_takes_what_it_is_given(function: Callable[..., Any], expected: list[str] | None) -> None:
    assert callable(function)
    if expected is not None:
        assert list(inspect.signature(function).parameters) == expected


def test_torch_keeps_shards_and_storages_where_the_engine_looks_for_them() -> None:
    assert "_fsdp_param_groups" in inspect.getsource(_fsdp_state.FSDPState)
    assert "fsdp_params" in inspect.getsource(_fsdp_param_group.FSDPParamGroup)
    kept = inspect.getsource(_fsdp_param.FSDPParam)
    assert all(name in kept for name in ("_sharded_param_data", "padded_sharded_param_size", "sharded_param"))
    assert "_local_tensor" in DTensor.__slots__

    one, other = torch.zeros(4), torch.zeros(4)
    assert engine_torch.share_storage(one, one[2:])
    assert not engine_torch.share_storage(one, other)
    assert planning_torch.storage_id(one.untyped_storage()) == planning_torch.storage_id(one[2:].untyped_storage())


def test_the_allocator_takes_what_its_variable_does() -> None:
    engine_torch.set_allocator("expandable_segments:False,max_split_size_mb:128")
    with pytest.raises(ValueError, match="'True' or 'False'"):
        engine_torch.set_allocator("expandable_segments:maybe")


def test_gloo_groups_take_the_devices_and_the_limit_in_their_options() -> None:
    options = dist.ProcessGroupGloo._Options()
    assert {"_devices", "_timeout"} <= set(dir(options))


def test_operations_have_the_expected_names() -> None:
    found = {planning_torch.operation_name(func) for func in (planning_torch.READ_NUMBER, planning_torch.UNSAFE_VIEW)}
    assert found == {"aten::_local_scalar_dense", "aten::_unsafe_view"}
    assert planning_torch.operation_name(planning_torch.WAIT) == "_c10d_functional::wait_tensor"
    assert planning_torch.changes_an_input(torch.ops.aten.add_.Tensor)
    assert not planning_torch.changes_an_input(torch.ops.aten.add.Tensor)


@pytest.mark.skipif(not engine_torch.has_onednn_linear(), reason="PyTorch was built without oneDNN")
def test_onednn_multiplies() -> None:
    input, weight_OI, bias_O = torch.randn(3, 5), torch.randn(2, 5), torch.randn(2)
    expected = nn.functional.linear(input, weight_OI, bias_O)
    torch.testing.assert_close(engine_torch.onednn_linear(input, weight_OI, bias_O), expected)


def test_transformers_declares_what_the_engine_asks() -> None:
    assert {"_is_stateful", "_no_split_modules", "_supports_attention_backend"} <= set(dir(PreTrainedModel))
    assert "_is_hf_initialized" in inspect.getsource(PreTrainedModel)
    assert {"_auto_class", "_attn_implementation"} <= set(dir(PreTrainedConfig))
    assert PreTrainedModel._auto_class is None
    assert isinstance(TokenizersBackend.backend_tokenizer, property)


def test_transformers_tells_of_a_model() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 9}
    config = Qwen2Config(**sizes, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    model = Qwen2ForCausalLM(config)
    assert layer_class_names(model) == {"Qwen2DecoderLayer"}
    assert not keeps_state(model)
    assert attention_implementation(model.config) == "sdpa"


def test_vllm_schedules_and_samples_as_expected() -> None:
    scheduler = pytest.importorskip("vllm.v1.core.sched.scheduler")
    request = pytest.importorskip("vllm.v1.request")
    updated = inspect.signature(scheduler.Scheduler._update_request_with_output)
    assert list(updated.parameters) == ["self", "request", "new_token_ids", "is_stale"]
    assert "self._output_token_ids: list[int]" in inspect.getsource(request.Request)
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    assert "torch.ops._C.fused_gumbel_argmax(" in inspect.getsource(sampler)
