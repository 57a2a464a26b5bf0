"""Freed memory is used again, and goes back to the system from time to time; Python's collector runs rarely."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def output_of(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


# What the process has of its own, wherever the system keeps it: that does not depend on what else the machine does.
OWN_MIB = """
import json
from pathlib import Path
from verl.process.startup import keep_freed_memory, return_free_memory

def own_mib():
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "VmSwap:")) / 1024

def block(mib):
    return bytearray(b"x" * int(mib * 2**20))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Blocks of half a MiB lie on the heap once one of them has been freed; each second one stays and keeps the heap high.
HOLES = """
bytearray(2**25 - 2**12)
blocks = [block(0.5) for _ in range(400)]
full = own_mib()
del blocks[::2]
before = own_mib()
return_free_memory()
print(json.dumps([full, before, own_mib()]))
"""


@linux
def test_holes_in_the_heap_are_given_back() -> None:
    full, before, after = json.loads(output_of(OWN_MIB + HOLES))
    assert full - before < 20, "glibc itself keeps the holes"
    assert full - after == pytest.approx(100, abs=10)  # 200 blocks of half a MiB


# Blocks of 4 to 28 MiB come and go, three times: how much the system has to give in the second and in the third round.
REUSE = """
def growth_mib(mib):
    before = own_mib()
    made = block(mib)
    return own_mib() - before

def round_mib():
    return sum(max(growth_mib(mib), 0) for mib in range(4, 32, 4))

keep_freed_memory()
round_mib()
return_free_memory()
again = round_mib()
return_free_memory(600)
print(json.dumps([again, round_mib()]))
"""


@linux
def test_freed_memory_is_used_again() -> None:
    again, third = json.loads(output_of(OWN_MIB + REUSE))
    assert again > 40, "the largest block, and what it is copied from, had gone back"
    assert third < 8, "56 without `keep_freed_memory`"


# 160 MiB are freed below a block that stays.
TIMES = """
def left_mib(every_s):
    before = own_mib()
    parts = [block(4) for _ in range(40)]
    kept = [block(4)]
    del parts
    return_free_memory(every_s)
    return own_mib() - before

keep_freed_memory()
return_free_memory()
print(json.dumps([left_mib(600), left_mib(0)]))
"""


@linux
def test_free_memory_is_returned_from_time_to_time() -> None:
    soon, later = json.loads(output_of(OWN_MIB + TIMES))
    assert soon == pytest.approx(160, abs=20)
    assert later == pytest.approx(-160, abs=20), "with that of the first call"


# Objects that stay alive, old and new ones.
COLLECTIONS = """
import gc
from verl.process.startup import collect_rarely

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
