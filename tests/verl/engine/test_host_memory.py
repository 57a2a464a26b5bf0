"""Host memory of two workers while a model is loaded and saved: a shard and one weight, never the whole model."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_workers
import pytest
import torch
import torch.distributed as dist
from engine_cases import CPU
from safetensors.torch import load_file
from tiny_models import qwen2_config, save_untrained

from verl.config.model import FsdpConfig, ModelConfig
from verl.engine.loading import load_sharded
from verl.engine.model import CausalModel
from verl.engine.saving import save_model
from verl.engine.sharding import local
from verl.errors import CheckpointError
from verl.heap import return_free_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


@pytest.fixture(scope="module")
def large_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 170 MiB in float32; its largest weight has 16 MiB."""
    folder = tmp_path_factory.mktemp("large_model")
    return str(save_untrained(qwen2_config(8192, 512, 4096, 6, (8, 2), 128), folder))


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


def load_and_save(folder: Path, model_path: str, small_path: str) -> dict[str, Any]:
    """Peaks in MiB above the start, the size of the shard, and how a save ended while rank 0 had no room for it."""
    fsdp = FsdpConfig()

    def load(path: str) -> CausalModel:
        return load_sharded(path, ModelConfig(), fsdp, fsdp.mixed_precision, CPU, None, trained=True)

    save_model(load(small_path), folder / "small", None)  # what the first use imports and maps is none of the model's
    loading, model = growth_mib(lambda: load(model_path))
    saving, _ = growth_mib(lambda: save_model(model, folder / "saved", None))
    shard = sum(part.untyped_storage().nbytes() for part in map(local, model.parameters())) / MIB
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * MIB, resource.RLIM_INFINITY))  # no file may grow beyond this
    with pytest.raises(CheckpointError) as failure:
        save_model(model, folder / "saved", None)
    return {"loading": loading, "saving": saving, "shard": shard, "failure": str(failure.value)}


def test_a_worker_holds_its_shard_and_one_weight(tmp_path: Path, large_model_dir: str, model_path: str) -> None:
    ranks = engine_workers.run(tmp_path, large_model_dir, model_path, 2, load_and_save)
    expected, saved = (
        load_file(folder / "model.safetensors") for folder in (Path(large_model_dir), tmp_path / "saved")
    )
    whole = sum(tensor.nbytes for tensor in expected.values()) / MIB
    for rank in ranks:
        assert rank["shard"] == pytest.approx(whole / 2, rel=0.01)
        assert rank["loading"] < rank["shard"] + 16 + 24, "24 for modules that are imported late"
        assert rank["saving"] < 16 + 24
        assert "saved could not be written" in rank["failure"]
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in expected)
    assert not list(tmp_path.glob(".saved*")), "what was written when the room ended is removed"
