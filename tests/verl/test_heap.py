"""Freed memory is used again, and goes back to the system from time to time; Python's collector runs rarely."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def output_of(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


# Blocks of half a MiB lie on the heap once one of them has been freed; each second one stays and keeps the heap high.
HOLES = """
import json
from pathlib import Path
from verl.heap import return_free_memory

def own_mib():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

bytearray(2**25 - 2**12)
blocks = [bytearray(b"x" * 2**19) for _ in range(400)]
full = own_mib()
del blocks[::2]
before = own_mib()
return_free_memory()
print(json.dumps([full, before, own_mib()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_holes_in_the_heap_are_given_back() -> None:
    full, before, after = json.loads(output_of(HOLES))
    assert full - before < 20, "glibc itself keeps the holes"
    assert full - after == pytest.approx(100, abs=10)  # 200 blocks of half a MiB


# Tensors of 4 to 28 MiB come and go: how many pages the system has to give in the second round.
REUSE = """
import resource
import sys
import torch
from verl.heap import keep_freed_memory, return_free_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
return_free_memory()
for _ in range(2):
    before = faults()
    for mib in range(4, 32, 4):
        torch.ones(mib * 2**18) * 2
    return_free_memory(float(sys.argv[1]))
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults")
def test_freed_memory_is_used_again() -> None:
    def faults(every_s: int) -> int:
        return int(output_of(REUSE, str(every_s)))

    assert faults(0) > 10_000
    assert faults(600) < 8_000  # mostly 0, and 30,000 without `keep_freed_memory`


# 160 MiB are freed below a tensor that stays.
TIMES = """
import json
import psutil
import torch
from verl.heap import keep_freed_memory, return_free_memory

def left_mib(every_s):
    rss = psutil.Process().memory_info().rss
    parts = [torch.ones(2**20) for _ in range(40)]
    kept = [torch.ones(2**20)]
    del parts
    return_free_memory(every_s)
    return (psutil.Process().memory_info().rss - rss) / 2**20

keep_freed_memory()
return_free_memory()
print(json.dumps([left_mib(600), left_mib(0)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_is_returned_from_time_to_time() -> None:
    soon, later = json.loads(output_of(TIMES))
    assert soon == pytest.approx(160, abs=20)
    assert later == pytest.approx(-160, abs=20), "with that of the first call"


# Objects that stay alive, old and new ones.
COLLECTIONS = """
import gc
from verl.heap import collect_rarely

old = [[] for _ in range(1000)]
collect_rarely()
counts = [0]
gc.callbacks.append(lambda phase, info: counts.__setitem__(0, counts[0] + (phase == "start")))
new = [[] for _ in range(50_000)]
frozen = gc.get_freeze_count() >= 1000
print(counts[0], frozen)
"""


def test_the_collector_runs_rarely() -> None:
    count, frozen = output_of(COLLECTIONS).split()
    assert 1 <= int(count) <= 6, "it still runs; by default it does so 70 times"
    assert frozen == "True"
