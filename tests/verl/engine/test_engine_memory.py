"""The heap of a worker does not keep what a step has left."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import value_cases
from engine_cases import make_batch, make_engine

from verl import heap
from verl.engine.trained import TrainedEngine


def own_mib() -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def actor(folder: Path, model_path: str) -> TrainedEngine:
    return make_engine(model_path, folder)


def critic(folder: Path, model_path: str) -> TrainedEngine:
    return value_cases.value_engine(value_cases.write_critic(folder), folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", [actor, critic])
def test_an_update_gives_the_holes_in_the_heap_back(
    make, tmp_path: Path, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_returned_at", -math.inf)  # an update before, in this process, may have done it just now
    engine, batch = make(tmp_path, model_path), make_batch() if make is actor else value_cases.value_batch()
    bytearray(2**25 - 2**12)  # from now on smaller blocks lie on the heap
    blocks = [bytearray(b"x" * 2**19) for _ in range(400)]
    del blocks[::2]  # 100 MiB of holes
    before = own_mib()
    engine.update(batch)
    assert before - own_mib() > 70
