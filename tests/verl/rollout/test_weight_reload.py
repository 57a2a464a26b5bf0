"""What vLLM's model holds after a sync in buckets: to the bit what it has when it loads the same weights from files."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tiny_models import qwen2_config
from transformers import Qwen2ForCausalLM
from weight_source import stream_of

FUSED = ("self_attn.qkv_proj", "mlp.gate_up_proj")
CASES = [(tied, dtype) for tied in (True, False) for dtype in ("float32", "bfloat16")]
BUCKETS_MIB = (0.05, 512)


def save_model(path: Path, tied: bool, seed: int) -> None:
    """Of 300 tokens, which vLLM pads to 320, with biases that are not zero."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(qwen2_config(300, 96, 256, 2, (3, 1), 64, tie_word_embeddings=tied, dtype="float32"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)


def test_buckets_leave_the_engine_s_model_as_loading_its_files_does(tmp_path: Path, weight_dir: Path) -> None:
    """Embeddings tied and untied, in both formats; in one bucket, and in those that cut apart what vLLM fuses."""
    for tied in (True, False):
        save_model(tmp_path / f"old {tied}", tied, seed=1)
        save_model(tmp_path / f"new {tied}", tied, seed=2)
    with mp.get_context("spawn").Pool(1) as process:  # vLLM keeps state of its models for the life of a process
        answers = process.apply(compare_all, (tmp_path, weight_dir))
    for case, by_size in zip(CASES, answers, strict=True):
        for bucket_mib, (num_buckets, num_changed, differing) in zip(BUCKETS_MIB, by_size, strict=True):
            assert differing == [], (case, bucket_mib)
            assert num_changed > 15 and (num_buckets > 5) == (bucket_mib < 1), (case, num_changed, num_buckets)


Compared = tuple[int, int, list[str]]


def compare_all(folder: Path, weight_dir: Path) -> list[list[Compared]]:
    """Number of buckets, of values that a sync has to change, and what is other than expected, for each case."""
    from verl.process.startup import before_libraries

    before_libraries()
    torch.accelerator.empty_cache = lambda: None  # as the runner of a CPU engine has it
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(config_of(folder / "old True", "float32")):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    return [list(compare(folder, tied, dtype, weight_dir)) for tied, dtype in CASES]


def compare(folder: Path, tied: bool, dtype: str, weight_dir: Path) -> Iterator[Compared]:
    old, new = folder / f"old {tied}", folder / f"new {tied}"
    expected = dict(values_of(model_of(new, dtype)))
    for bucket_mib in BUCKETS_MIB:
        model = model_of(old, dtype)
        before = dict(values_of(model))
        count = load(model, new, dtype, weight_dir, bucket_mib)
        found = dict(values_of(model))
        assert found.keys() == expected.keys() == before.keys()
        changed = {name for name in found if not torch.equal(before[name], expected[name])}
        assert changed >= {f"model.layers.{i}.{part}()" for i in range(2) for part in FUSED} | {"lm_head()"}
        yield count, len(changed), [name for name in found if not torch.equal(found[name], expected[name])]


def load(model: Any, source: Path, dtype: str, weight_dir: Path, bucket_mib: float) -> int:
    """Through the extension of an engine's worker. Returns the number of buckets."""
    from verl.rollout.weight_sync import WeightSyncExtension

    rank = WeightSyncExtension()
    rank.model_runner = SimpleNamespace(get_model=lambda: model, reset_lora_state=lambda: None)
    rank.vllm_config, rank.device = config_of(source, dtype), torch.device("cpu")
    named = Qwen2ForCausalLM.from_pretrained(source, dtype=torch.float32).named_parameters()
    count = 0
    for bucket in stream_of(named, 1, weight_dir, getattr(torch, dtype), bucket_mib).buckets:
        assert rank.load_bucket(dict(bucket.exports), dict(bucket.sums), bucket.index, bucket.count) == []
        count = bucket.count
    return count


def config_of(model_dir: Path, dtype: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    settings: dict[str, Any] = {"dtype": dtype, "max_model_len": 64, "kv_cache_memory_bytes": 2**20}
    return EngineArgs(
        model=str(model_dir), enforce_eager=True, skip_tokenizer_init=True, **settings
    ).create_engine_config()


def model_of(model_dir: Path, dtype: str) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = config_of(model_dir, dtype)
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


@torch.no_grad()
def values_of(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and what each layer makes of one input, which reads what the CPU kernels have packed."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        yield name, tensor.clone()
    draw = torch.Generator().manual_seed(3)
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "apply") and hasattr(layer, "weight"):
            width = layer.input_size if hasattr(layer, "input_size") else layer.embedding_dim
            inputs = torch.randn(5, width, generator=draw).to(model.model.norm.weight.dtype)
            yield f"{name}()", method.apply(layer, inputs, getattr(layer, "bias", None))
        if isinstance(layer, VocabParallelEmbedding) and layer.weight.numel():
            yield f"{name}[]", method.embedding(layer, torch.arange(300))
