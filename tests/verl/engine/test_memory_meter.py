"""Memory: by phase and on a GPU by which calls; the heap after a step; the host while a model is loaded and saved."""

from __future__ import annotations

import inspect
import math
import mmap
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import engine_workers
import psutil
import pytest
import torch
import torch.distributed as dist
import value_cases
from engine_cases import CPU, make_batch, make_engine
from safetensors.torch import load_file
from tiny_models import qwen2_config, save_untrained

from program_end import exit_status
from verl.config.sections.model import FsdpConfig, ModelConfig
from verl.engine.device.memory import GIB, CudaMemory, DeviceMemory, MemoryMeter, Usage, in_phase
from verl.engine.device.sharding import local
from verl.engine.files.loading import load_sharded
from verl.engine.files.saving import save_model
from verl.engine.model import CausalModel
from verl.engine.trained import TrainedEngine
from verl.errors import CheckpointError, DeviceOutOfMemory
from verl.phases import Phase
from verl.process import startup
from verl.process.startup import return_free_memory
from verl.tracking.spans import SpanRecorder

READS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Planned(DeviceMemory):
    """Usages in the order in which they are asked for; `restart_peak` writes 0."""

    def __init__(self, *usages: Usage) -> None:
        self.left = list(usages)
        self.calls: list[str] = []

    def restart_peak(self) -> None:
        self.calls.append("restart")

    def usage(self) -> Usage:
        self.calls.append("usage")
        return self.left.pop(0)


def test_the_most_of_a_phase_counts_once() -> None:
    memory = Planned(Usage(3 * GIB, 9 * GIB), Usage(2 * GIB, 10 * GIB), Usage(GIB, None))
    meter = MemoryMeter(memory, "actor")
    for phase in (Phase.SCORE, Phase.SCORE, Phase.SYNC):
        with meter.during(phase):
            assert memory.calls[-1] == "restart"
    found = {"memory_gib/score/actor": 3.0, "memory_gib/score/device": 10.0, "memory_gib/sync/actor": 1.0}
    assert meter.metrics() == found
    assert meter.metrics() == {}, "each step counts its own"


def test_a_method_is_counted_with_what_it_returns() -> None:
    class Worker:
        memory, spans = MemoryMeter(Planned(Usage(GIB, None)), "critic"), SpanRecorder()

        @in_phase(Phase.UPDATE)
        def update(self, number: int, twice: bool = False) -> int:
            return number * (1 + twice)

    worker = Worker()
    assert worker.update(2, twice=True) == 4
    assert worker.memory.metrics() == {"memory_gib/update/critic": 1.0}
    assert [span.name for span in worker.spans.take()] == ["update"]


def test_memory_that_ran_out_is_an_error_with_phase_rank_and_settings() -> None:
    """On a CPU for real, and a GPU's error; another error of PyTorch stays what it is."""
    meter = MemoryMeter(Planned(*[Usage(3 * GIB, 78 * GIB)] * 2), "critic", 5)
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated ...")
    with pytest.raises(DeviceOutOfMemory) as found, meter.during(Phase.UPDATE):
        raise gpu
    told = str(found.value)
    assert "critic, rank 5: no memory left in phase update" in told and "gradients, optimizer, parameters" in told
    assert "3.0 GiB at most, all processes of the device 78.0" in told and "enable_gradient_checkpointing" in told
    assert told.endswith("CUDA out of memory. Tried to allocate 2.00 GiB.")
    loading = meter.explaining("while the model is loaded")
    with pytest.raises(DeviceOutOfMemory, match="while the model is loaded.*offload"), loading:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="size of tensor"), meter.during(Phase.SCORE):
        torch.ones(2) + torch.ones(3)


def test_a_run_whose_device_is_full_is_not_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise DeviceOutOfMemory("critic, rank 5: no memory left")

    assert exit_status(run, "") == 2  # what scripts/run_with_restart.sh gives up at
    assert capsys.readouterr().err == "error: critic, rank 5: no memory left\n"


def test_on_cpu_it_is_the_memory_of_the_process() -> None:
    before = psutil.Process().memory_info().rss
    with mmap.mmap(-1, 64 * 2**20) as ballast:  # an allocator would hand out pages that it already has
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
        usage = DeviceMemory().usage()
        assert usage.device is None and usage.process >= before + len(ballast) // 2


def test_on_a_gpu_the_peak_is_added_to_what_others_have() -> None:
    """80 in all, 50 free: of the 30 in use 4 are held by this process now, and 20 were at its peak."""
    calls = {
        "mem_get_info": (50 * GIB, 80 * GIB),
        "max_memory_reserved": 20 * GIB,
        "memory_reserved": 4 * GIB,
        "reset_peak_memory_stats": None,
    }
    device = torch.device("cuda", 0)
    for name, value in calls.items():
        inspect.signature(getattr(torch.cuda, name)).bind(device)
        patch.object(torch.cuda, name, lambda asked, value=value: value if asked == device else pytest.fail()).start()
    try:
        CudaMemory(device).restart_peak()
        assert CudaMemory(device).usage() == Usage(20 * GIB, 46 * GIB)
    finally:
        patch.stopall()


def own_mib() -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


@READS_PROC
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_update_gives_the_holes_in_the_heap_back(
    role: str, tmp_path: Path, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "_returned_at", -math.inf)  # an update in this process may have done it just now
    engine: TrainedEngine = make_engine(model_path, tmp_path)
    batch = make_batch()
    if role == "critic":
        engine = value_cases.value_engine(value_cases.write_critic(tmp_path), tmp_path)
        batch = value_cases.value_batch()
    bytearray(2**25 - 2**12)  # from now on smaller blocks lie on the heap
    blocks = [bytearray(b"x" * 2**19) for _ in range(400)]
    del blocks[::2]  # 100 MiB of holes
    before = own_mib()
    engine.update(batch)
    assert before - own_mib() > 70


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


@READS_PROC
def test_a_worker_holds_its_shard_and_one_weight(tmp_path: Path, large_model_dir: str, model_path: str) -> None:
    ranks = engine_workers.run(tmp_path, large_model_dir, model_path, 2, load_and_save, fresh=True)
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
