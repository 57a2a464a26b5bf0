"""Memory between what stays goes back to the system."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=60, check=True)
    full, before, after = json.loads(done.stdout)
    assert full - before < 20, "glibc itself keeps the holes"
    assert full - after == pytest.approx(100, abs=10)  # 200 blocks of half a MiB
