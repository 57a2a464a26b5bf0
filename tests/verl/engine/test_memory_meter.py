"""Memory by phase: what is counted, on a GPU by which calls, and that they are given what they take."""

from __future__ import annotations

import inspect
import mmap
from unittest.mock import patch

import psutil
import pytest
import torch

from verl.engine.device_memory import CudaMemory, DeviceMemory, Usage
from verl.engine.memory_meter import GIB, MemoryMeter, in_phase
from verl.phases import Phase
from verl.tracking.spans import SpanRecorder


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
