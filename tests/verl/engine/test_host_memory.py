"""Host memory of two workers while a model is loaded and saved: a shard and one weight, never the whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
from engine_cases import CPU
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.model import FsdpConfig, ModelConfig
from verl.engine.loading import load_sharded
from verl.engine.sharding import local_shards
from verl.heap import return_free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


@pytest.fixture(scope="module")
def large_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 170 MiB in float32; its largest weight has 16 MiB."""
    folder = tmp_path_factory.mktemp("large_model")
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = Qwen2Config(vocab_size=8192, num_key_value_heads=2, max_position_embeddings=128, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def size_mib(key: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{key}:"))
    return int(line.split()[1]) / 1024


def growth_mib(work: Callable[[], Any]) -> tuple[float, Any]:
    """How far the resident memory rises above where it was, mapped files included, and what the work returns."""
    return_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = size_mib("VmRSS")
    result = work()
    return size_mib("VmHWM") - before, result


def load_and_save(folder: Path, model_path: str, _: str) -> dict[str, Any]:
    """Peaks in MiB above the start, and the size of the shard."""
    fsdp = FsdpConfig()
    torch.empty(MIB).fill_(0)  # what the first use of torch takes
    load = lambda: load_sharded(model_path, ModelConfig(), fsdp, fsdp.mixed_precision, CPU, None, trained=True)  # noqa: E731
    loading, model = growth_mib(load)
    shard = sum(part.untyped_storage().nbytes() for part in local_shards(model)) / MIB
    return {"loading": loading, "shard": shard}


def test_a_worker_holds_its_shard_and_one_weight(tmp_path: Path, large_model_dir: str) -> None:
    ranks = engine_workers.run(tmp_path, large_model_dir, "", 2, load_and_save)
    whole = sum(tensor.nbytes for tensor in load_file(Path(large_model_dir) / "model.safetensors").values()) / MIB
    for rank in ranks:
        assert rank["shard"] == pytest.approx(whole / 2, rel=0.01)
        assert rank["loading"] < rank["shard"] + 16 + 24, "24 for modules that are imported late"
